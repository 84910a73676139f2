// Random numbers of the device: a seed and an offset, as Philox has them on CUDA. Each kernel that draws gets an engine
// of the CPU that the two determine, so a state that is restored replays the same numbers.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <mutex>
#include <optional>

#include "device.h"

namespace simulated_cuda {
namespace {

constexpr int64_t kStateBytes = 16;
constexpr uint64_t kStep = 4;  // CUDA's offsets are multiples of four, too

struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device)
      : GeneratorImpl(c10::Device(kType, static_cast<c10::DeviceIndex>(device)), c10::DispatchKeySet(kKey)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == kStateBytes && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
                    state.device().is_cpu() && state.is_contiguous(),
                "RNG state must be a contiguous torch.ByteTensor of ", kStateBytes, " elements on the CPU");
    const auto* bytes = static_cast<const uint8_t*>(state.data());
    memcpy(&seed_, bytes, sizeof seed_);
    memcpy(&offset_, bytes + sizeof seed_, sizeof offset_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({kStateBytes}, at::kByte);
    auto* bytes = state.mutable_data_ptr<uint8_t>();
    memcpy(bytes, &seed_, sizeof seed_);
    memcpy(bytes + sizeof seed_, &offset_, sizeof offset_);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  // At offset 0 the numbers are those of the CPU at the same seed.
  uint64_t next_seed() {
    const uint64_t next = seed_ ^ (offset_ * 0x9E3779B97F4A7C15ull);
    offset_ += kStep;
    return next;
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

}  // namespace

const at::Generator& default_generator(int device) {
  static std::mutex mutex;
  static std::optional<at::Generator> generators[kMostDevices];
  TORCH_CHECK(device >= 0 && device < kMostDevices, "CUDA error: invalid device ordinal ", device);
  const std::lock_guard<std::mutex> lock(mutex);
  if (!generators[device]) generators[device] = new_generator(device);
  return *generators[device];
}

at::Generator new_generator(int device) { return at::make_generator<Generator>(device); }

at::Generator draw(const at::Generator& device_generator) {
  TORCH_CHECK(device_generator.device().type() == kType, "Expected a 'cuda' device type for generator but found '",
              device_generator.device().type(), "'");
  auto* generator = static_cast<Generator*>(device_generator.unsafeGetGeneratorImpl());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  return at::detail::createCPUGenerator(generator->next_seed());
}

DrawFromDevice::DrawFromDevice(int device) : cpu_(at::detail::getDefaultCPUGenerator()) {
  const auto drawn = draw(default_generator(device));
  const std::lock_guard<std::mutex> lock(cpu_.mutex());
  state_ = cpu_.unsafeGetGeneratorImpl()->get_state();
  cpu_.unsafeGetGeneratorImpl()->set_state(*drawn.unsafeGetGeneratorImpl()->get_state());
}

DrawFromDevice::~DrawFromDevice() {
  const std::lock_guard<std::mutex> lock(cpu_.mutex());
  cpu_.unsafeGetGeneratorImpl()->set_state(*state_);
}

}  // namespace simulated_cuda
