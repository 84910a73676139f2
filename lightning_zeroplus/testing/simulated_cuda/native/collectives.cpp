// A process group with NCCL's rules, on top of Gloo: device tensors only, one device for each rank, collectives on a
// stream of their own that waits for the current one, and works that a stream, not the host, waits for.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "device.h"
#include "log.h"
#include "memory.h"

namespace simulated_cuda {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Work final : c10d::Work {
  Work(int64_t event, Tensors outputs) : event_(event), outputs_(std::move(outputs)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override { wait_event("work.wait", current_device(), current_stream(current_device()), event_); }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::ofTensors(), std::vector<c10::Device>{c10::Device(kType, static_cast<c10::DeviceIndex>(current_device()))});
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  int64_t event_;
  Tensors outputs_;
};

// Waits for Gloo without the GIL, which a hook of another thread may need.
void finish(const WorkPtr& work) {
  std::optional<pybind11::gil_scoped_release> released;
  if (PyGILState_Check()) released.emplace();
  work->wait();
}

Tensor host_of(const Tensor& tensor) {
  TORCH_CHECK(on_device(tensor), "NCCL takes CUDA tensors only, not one on ", tensor.device(), ".");
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
  return on_host(tensor);
}

Tensors hosts_of(const Tensors& tensors) {
  Tensors hosts;
  for (const Tensor& each : tensors) hosts.push_back(host_of(each));
  return hosts;
}

Tensors flat(const Lists& lists) {
  Tensors all;
  for (const Tensors& each : lists) all.insert(all.end(), each.begin(), each.end());
  return all;
}

class Nccl final : public c10d::Backend {
 public:
  Nccl(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo) : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return launched_; }
  void eagerConnectSingleDevice(at::Device device) override { bind(device.index()); }

  void startCoalescing() override { coalescing_ = true; }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    auto outputs = std::exchange(coalesced_, {});
    return c10::make_intrusive<Work>(record_event("nccl", current_device(), stream_), std::move(outputs));
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto launch = start(tensors, options.asyncOp);
    auto hosts = hosts_of(tensors);
    finish(gloo_->broadcast(hosts, waited(options)));
    return end(launch, "broadcast", {}, tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const auto launch = start(tensors, options.asyncOp);
    for (Tensor& each : hosts_of(tensors)) reduce_all(each, options.reduceOp);
    return end(launch, "all_reduce", {}, tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    const auto launch = start(tensors, options.asyncOp);
    for (Tensor& each : hosts_of(tensors)) reduce_all(each, options.reduceOp);
    return end(launch, "all_reduce_coalesced", {}, tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const auto launch = start(tensors, options.asyncOp);
    for (Tensor& each : hosts_of(tensors)) {
      Tensor sum = each.clone();  // the other ranks keep what they have
      reduce_all(sum, options.reduceOp);
      if (getRank() == options.rootRank) each.copy_(sum);
    }
    return end(launch, "reduce", {}, tensors);
  }
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const auto launch = start(inputs, options.asyncOp);
    Lists hosts;
    for (const Tensors& each : outputs) hosts.push_back(hosts_of(each));
    auto from = hosts_of(inputs);
    finish(gloo_->allgather(hosts, from, waited(options)));
    return end(launch, "all_gather", inputs, flat(outputs));
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    const auto launch = start({input}, options.asyncOp);
    gather_into(output, input);
    return end(launch, "all_gather_into_tensor", {input}, {output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    const auto launch = start(inputs, options.asyncOp);
    for (size_t i = 0; i < outputs.size(); i++) gather_into(outputs[i], inputs[i]);
    return end(launch, "all_gather_into_tensor_coalesced", inputs, outputs);
  }
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    const auto launch = start(outputs, options.asyncOp);
    for (size_t i = 0; i < outputs.size(); i++)
      for (int rank = 0; rank < getSize(); rank++) {
        Tensor sum = host_of(inputs[i][rank]).clone();
        reduce_all(sum, options.reduceOp);
        if (rank == getRank()) host_of(outputs[i]).copy_(sum);
      }
    return end(launch, "reduce_scatter", flat(inputs), outputs);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    const auto launch = start({input}, options.asyncOp);
    scatter_sum(output, input, options.reduceOp);
    return end(launch, "reduce_scatter_tensor", {input}, {output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    const auto launch = start(inputs, options.asyncOp);
    for (size_t i = 0; i < outputs.size(); i++) scatter_sum(outputs[i], inputs[i], options.reduceOp);
    return end(launch, "reduce_scatter_tensor_coalesced", inputs, outputs);
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    const auto launch = start({input}, options.asyncOp);
    auto to = host_of(output), from = host_of(input);
    finish(gloo_->alltoall_base(to, from, output_sizes, input_sizes, waited(options)));
    return end(launch, "all_to_all_single", {input}, {output});
  }
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const auto launch = start(inputs, options.asyncOp);
    Lists hosts;
    for (const Tensors& each : outputs) hosts.push_back(hosts_of(each));
    auto from = hosts_of(inputs);
    finish(gloo_->gather(hosts, from, waited(options)));
    return end(launch, "gather", inputs, flat(outputs));
  }
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    const auto launch = start(outputs, options.asyncOp);
    Lists hosts;
    for (const Tensors& each : inputs) hosts.push_back(hosts_of(each));
    auto to = hosts_of(outputs);
    finish(gloo_->scatter(to, hosts, waited(options)));
    return end(launch, "scatter", flat(inputs), outputs);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    const auto launch = start(tensors, true, false);
    auto hosts = hosts_of(tensors);
    finish(gloo_->send(hosts, to, tag));
    return end(launch, "send", tensors, {});
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    const auto launch = start(tensors, true, false);
    auto hosts = hosts_of(tensors);
    finish(gloo_->recv(hosts, from, tag));
    return end(launch, "recv", {}, tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    const auto launch = start({}, options.asyncOp);
    finish(gloo_->barrier(c10d::BarrierOptions()));
    auto work = end(launch, "barrier", {}, {});
    if (!options.asyncOp) add({Kind::sync_stream, "barrier", launch.device, current_stream(launch.device)});
    return work;
  }

 private:
  struct Launch {
    int device;
    int64_t stream;
  };

  template <class Options>
  static Options waited(Options options) {
    options.asyncOp = true;
    return options;
  }

  // NCCL: a collective that is not asynchronous runs on the current stream, as any kernel.
  Launch start(const Tensors& tensors, bool asynchronous, bool of_all_ranks = true) {
    for (const Tensor& each : tensors) host_of(each);  // raises before anything is sent
    const int device = tensors.empty() ? current_device() : tensors[0].device().index();
    if (of_all_ranks) bind(device);
    launched_++;
    if (!asynchronous && !coalescing_) return {device, current_stream(device)};
    wait_event("nccl", device, stream_, record_event("nccl", device, current_stream(device)));
    return {device, stream_};
  }

  WorkPtr end(const Launch& launch, const char* name, const Tensors& inputs, const Tensors& outputs) {
    Entry entry{Kind::collective, std::string("nccl::") + name, launch.device, launch.stream};
    for (const Tensor& each : inputs) add_access(entry, each, false);
    for (const Tensor& each : outputs) add_access(entry, each, true);
    Entry kept{Kind::record_stream, "nccl", launch.device, launch.stream, 0, entry.accesses};
    add(std::move(entry));
    // On its own stream NCCL keeps them alive. On the current one it is a kernel as any other.
    if (launch.stream == stream_ && !kept.accesses.empty()) add(std::move(kept));
    if (coalescing_) coalesced_.insert(coalesced_.end(), outputs.begin(), outputs.end());
    return c10::make_intrusive<Work>(record_event("nccl", launch.device, launch.stream), outputs);
  }

  // NCCL: a communicator has one device of each rank, and no device twice.
  void bind(int device) {
    TORCH_CHECK(device_ < 0 || device_ == device, "NCCL: rank ", getRank(), " has used this process group on cuda:",
                device_, ", and now passes a tensor on cuda:", device,
                ". The other ranks would wait for it forever. Is the current device, or the tensor's, the wrong one?");
    if (device_ == device) return;
    const auto options = at::TensorOptions(at::kInt);
    Lists devices{Tensors()};
    for (int rank = 0; rank < getSize(); rank++) devices[0].push_back(at::full({1}, -1, options));
    Tensors mine{at::full({1}, device, options)};
    finish(gloo_->allgather(devices, mine, c10d::AllgatherOptions()));
    for (int rank = 0; rank < getSize(); rank++)
      TORCH_CHECK(rank == getRank() || devices[0][rank].item<int>() != device, "Duplicate GPU detected : rank ",
                  std::min(rank, getRank()), " and rank ", std::max(rank, getRank()), " both on CUDA device ", device);
    device_ = device;
  }

  void reduce_all(Tensor& host, const c10d::ReduceOp& op) {
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
      const auto* factor = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
      TORCH_CHECK(factor != nullptr, "PREMUL_SUM has no factor");
      factor->tensor_factor.defined() ? host.mul_(on_host(factor->tensor_factor)) : host.mul_(factor->double_factor);
    }
    const bool sum = op.op_ == c10d::ReduceOp::PREMUL_SUM || op.op_ == c10d::ReduceOp::AVG;
    if (sum) options.reduceOp = c10d::ReduceOp::SUM;
    Tensors hosts{host};
    finish(gloo_->allreduce(hosts, options));
    if (op.op_ == c10d::ReduceOp::AVG) host.is_floating_point() ? host.div_(getSize()) : host.div_(getSize(), "trunc");
  }

  void gather_into(const Tensor& output, const Tensor& input) {
    auto to = host_of(output), from = host_of(input).clone();  // the input may be a part of the output
    finish(gloo_->_allgather_base(to, from, c10d::AllgatherOptions()));
  }

  void scatter_sum(const Tensor& output, const Tensor& input, const c10d::ReduceOp& op) {
    Tensor sum = host_of(input).clone();
    reduce_all(sum, op);
    host_of(output).view(-1).copy_(sum.reshape(-1).narrow(0, getRank() * output.numel(), output.numel()));
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  const int64_t stream_ = new_stream();
  int device_ = -1;
  bool coalescing_ = false;
  Tensors coalesced_;
  uint64_t launched_ = 0;
};

}  // namespace

void bind_collectives(pybind11::module_& module) {
  pybind11::module_::import("torch.distributed");  // which binds the base class
  pybind11::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(module, "Nccl")
      .def(pybind11::init<int, int, c10::intrusive_ptr<c10d::Backend>>());
}

}  // namespace simulated_cuda
