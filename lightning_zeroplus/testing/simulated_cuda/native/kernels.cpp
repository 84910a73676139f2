// Every operator of the device is the CPU's kernel on the same memory. What it reads and writes is known from its schema.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <unordered_set>

#include "device.h"
#include "log.h"
#include "memory.h"

namespace simulated_cuda {
namespace {

using at::Tensor;
using Names = std::unordered_set<std::string>;

// The host needs a value or the size of the output: it waits for the stream.
const Names kHostReads{"aten::_local_scalar_dense", "aten::_unique2",           "aten::bincount",
                       "aten::equal",               "aten::is_nonzero",         "aten::masked_select",
                       "aten::nonzero",             "aten::unique_consecutive", "aten::unique_dim"};
// These take indices on the host, which are copied to the device. Of a mask, torch itself calls `nonzero` before.
const Names kIndexing{"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
                      "aten::_unsafe_index_put"};

void host_waits(const std::string& operation, int device) {
  add({Kind::sync_stream, operation, device, current_stream(device)});
}

bool makes_views(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

// One call of an operator: device tensors become CPU tensors on the way in, and fresh CPU tensors the device's on the
// way out.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), entry_{Kind::kernel, op.schema().name()} {}

  void run() {
    TORCH_CHECK(op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "The simulated CUDA device cannot run ",
                schema_.operator_name(), ": the CPU has no kernel for it.");
    arguments();
    if (device_ < 0) device_ = current_device();
    TORCH_CHECK(host_argument_.empty(), "Expected all tensors to be on the same device, but found at least two devices,"
                " cuda:", device_, " and cpu! (", schema_.name(), ", argument ", host_argument_, ")");
    entry_.device = device_;
    entry_.stream = current_stream(device_);
    random();
    for (int i = 0; i < indices_on_host_; i++) host_waits("indices to the device", device_);
    {
      std::optional<DrawFromDevice> drawing;
      if (draws_) drawing.emplace(device_);
      const at::AutoDispatchBelowADInplaceOrView guard;
      const at::DisableRecordFunctionGuard not_the_host;  // its operators are parts of this kernel
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    results();
    resized();
    for (const Tensor& each : written_) each.unsafeGetTensorImpl()->bump_version();
    add(entry_);
    if (kHostReads.count(schema_.name())) host_waits(schema_.name(), device_);
  }

 private:
  void arguments() {
    const auto count = schema_.arguments().size();
    for (size_t i = 0; i < count; i++) {
      const auto& argument = schema_.arguments()[i];
      auto& value = (*stack_)[stack_->size() - count + i];
      const bool write = argument.alias_info() && argument.alias_info()->isWrite();
      if (value.isTensor()) {
        value = convert(value.toTensor(), write, argument.name());
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& each : value.toTensorVector()) {
          list.push_back(convert(each, write, argument.name()));
          if (write && counts_itself_ && each.defined() && !each.is_inference()) written_.push_back(each);
        }
        value = list;
      } else if (value.isOptionalTensorList()) {
        value = convert_indices(value.toOptionalTensorList(), argument.name());
      } else if (value.isDevice() && value.toDevice().type() == kType) {
        if (device_ < 0) device_ = value.toDevice().index() < 0 ? current_device() : value.toDevice().index();
        value = c10::Device(c10::DeviceType::CPU);
      }
    }
  }

  c10::List<std::optional<Tensor>> convert_indices(const c10::List<std::optional<Tensor>>& given,
                                                   const std::string& argument) {
    c10::List<std::optional<Tensor>> list;
    for (size_t i = 0; i < given.size(); i++) {
      const std::optional<Tensor> each = given[i];
      list.push_back(each ? std::optional<Tensor>(convert(*each, false, argument)) : each);
    }
    return list;
  }

  Tensor convert(const Tensor& tensor, bool write, const std::string& argument) {
    if (!tensor.defined()) return tensor;
    if (on_device(tensor)) {
      const int device = tensor.device().index();
      TORCH_CHECK(device_ < 0 || device_ == device, "Expected all tensors to be on the same device, but found at least"
                  " two devices, cuda:", device_, " and cuda:", device, "! (", schema_.name(), ", argument ", argument,
                  ")");
      device_ = device;
      if (!is_view_) add_access(entry_, tensor, write);
      for (const auto& [original, host] : pairs_)
        if (original.is_same(tensor)) return host;
      pairs_.emplace_back(tensor, on_host(tensor));
      return pairs_.back().second;
    }
    if (!tensor.device().is_cpu() || (tensor.dim() == 0 && !write)) return tensor;  // as CUDA takes scalars of the CPU
    if (kIndexing.count(schema_.name()) && !write)
      indices_on_host_++;
    else
      host_argument_ = argument;
    return tensor;
  }

  void random() {
    const auto tags = op_.getTags();
    draws_ = std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end();
    const auto count = schema_.arguments().size();
    for (size_t i = 0; i < count; i++) {
      if (!schema_.arguments()[i].type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) continue;
      auto& value = (*stack_)[stack_->size() - count + i];
      value = draw(value.isNone() ? default_generator(device_) : value.toGenerator());
      draws_ = false;
    }
  }

  void results() {
    const auto count = schema_.returns().size();
    for (size_t i = stack_->size() - count; i < stack_->size(); i++) {
      auto& value = (*stack_)[i];
      if (value.isTensor()) {
        value = result(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& each : value.toTensorVector()) list.push_back(result(each));
        value = list;
      }
    }
  }

  Tensor result(const Tensor& made) {
    if (!made.defined() || !made.device().is_cpu()) return made;
    for (const auto& [original, host] : pairs_) {
      if (!host.is_same(made)) continue;
      if (made.sizes() != original.sizes() || made.strides() != original.strides()) take_over(original, made, device_);
      return original;
    }
    for (const auto& [original, host] : pairs_)
      if (made.has_storage() && made.storage().nbytes() && made.storage().data() == original.storage().data())
        return view(original, made);
    const Tensor fresh = to_device(made, device_);
    add_access(entry_, fresh, true);
    return fresh;
  }

  // What a kernel writes to and does not return, as the statistics of an observer, it may also resize.
  void resized() {
    for (const auto& [original, host] : pairs_)
      if (host.has_storage() && host.sizes() != original.sizes()) take_over(original, host, device_);
  }

  static Tensor view(const Tensor& original, const Tensor& made) {
    auto result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(original.storage()),
                                                           c10::DispatchKeySet(kKey), made.dtype());
    result.unsafeGetTensorImpl()->set_storage_offset(made.storage_offset());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
    return result;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  Entry entry_;
  int device_ = -1;
  bool draws_ = false;
  std::string host_argument_;
  int indices_on_host_ = 0;  // of an indexing operator
  std::vector<std::pair<Tensor, Tensor>> pairs_;
  // It touches no memory: `view_as_complex` of what a collective still writes is right.
  const bool is_view_ = makes_views(schema_);
  // CUDA's kernels for many tensors tell autograd what they write. Of other operators autograd knows it.
  const bool counts_itself_ = schema_.name().rfind("aten::_foreach_", 0) == 0;
  std::vector<Tensor> written_;
};

void on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { Call(op, stack).run(); }

void plain_copy(const Tensor& to, const Tensor& from) {
  const at::DisableRecordFunctionGuard not_the_host;  // host.cpp would take it for the program's own
  const at::AutoDispatchBelowADInplaceOrView guard;
  (on_device(to) ? on_host(to) : to).copy_(on_device(from) ? on_host(from) : from);
}

// Between two devices: the copy runs on a stream of the source and waits for the stream of the target, which then
// waits for the copy.
void between_devices(Entry entry, int to, int from) {
  wait_event("copy between devices", from, entry.stream, record_event("copy between devices", to, current_stream(to)));
  add(entry);
  wait_event("copy between devices", to, current_stream(to), record_event("copy between devices", from, entry.stream));
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (self.is_same(from)) return self;
  const bool within = on_device(self) && on_device(from);
  const int device = on_device(from) ? from.device().index() : self.device().index();
  Entry entry{Kind::kernel, within ? "aten::copy_" : on_device(self) ? "memcpy_h2d" : "memcpy_d2h", device,
              current_stream(device)};
  const Tensor& host = on_device(self) ? from : self;
  const bool asynchronous = within || (non_blocking && is_pinned(host.storage().data()));
  // Pageable memory is read or written before the call returns: nobody can race with that.
  if (on_device(from) || asynchronous) add_access(entry, from, false);
  if (on_device(self) || asynchronous) add_access(entry, self, true);
  plain_copy(self, from);
  if (!self.numel()) return self;
  if (within && self.device() != from.device()) {
    between_devices(entry, self.device().index(), device);
  } else {
    add(entry);
  }
  // With `non_blocking=True` CUDA copies from pageable memory through a buffer of its own. It waits for that buffer, and
  // not for what the stream was given before.
  if (!asynchronous) add({on_device(self) && non_blocking ? Kind::may_wait : Kind::sync_stream, entry.name, device,
                          current_stream(device)});
  return self;
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(kKey),
                                   dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), c10::DispatchKeySet(kKey),
                                           dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

// The tangent of what does not depend on the direction: it has no memory.
Tensor zero_tensor(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                   std::optional<c10::Device> device, std::optional<bool>) {
  const auto index = device && device->has_index() ? device->index() : static_cast<c10::DeviceIndex>(current_device());
  at::native::ZeroTensorAllocator nothing(c10::Device(kType, index));
  const auto keys = c10::DispatchKeySet(kKey) | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(size, &nothing, keys, dtype.value_or(c10::get_default_dtype_as_scalartype()),
                                   std::nullopt);
}

Tensor& set_empty(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return at::native::set_storage_cpu_(self, storage, 0, {0}, {});
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

void record_stream(Tensor& self, c10::Stream stream) {
  Entry entry{Kind::record_stream, "", stream.device_index(), stream.id()};
  add_access(entry, self, false);
  add(std::move(entry));
}

// Attention in its parts: the fused kernels of the two devices have different names.
int64_t attention_in_parts(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                           std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &zero_tensor);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view.dtype", &at::native::view_dtype);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &set_empty);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, c10::Storage)>(&at::native::set_));
  m.impl("resize_", &resize_);
  m.impl("copy_", &copy_);
  m.impl("record_stream", &record_stream);
  // As on CUDA, these are one kernel each. Without a kernel for the device, torch would make several of them.
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool one = op.name.rfind("aten::_foreach_", 0) == 0 || op.name == "aten::convolution" ||
                     op.name == "aten::convolution_backward";
    if (!one) continue;
    const std::string name = op.overload_name.empty() ? op.name : op.name + "." + op.overload_name;
    m.impl(name.c_str() + strlen("aten::"), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
}

const bool attention = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_in_parts), true);

}  // namespace
}  // namespace simulated_cuda
