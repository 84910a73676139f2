// What torch asks of a device: its guard (devices, streams, events) and CUDA's hooks.
#include "device.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <utility>

#include "log.h"
#include "memory.h"

namespace simulated_cuda {
namespace {

std::atomic<int> devices{1};
std::atomic<int64_t> streams{1}, events{1};
thread_local int this_device = 0;
thread_local int64_t this_stream[kMostDevices] = {};

// How often the host asks whether an event is over until it is told so: for loops that ask on and on.
constexpr int kPatience = 1000;

struct Event {
  int64_t number = new_event();
  int64_t recorded = 0;  // when, where, and how often the host has asked since
  int device = 0;
  int64_t stream = 0;
  int asked = 0;
  bool timed = false;
  std::chrono::steady_clock::time_point time;
};

// As of an event: whether the host, which asks once more, is told that the stream has nothing left to do.
bool asked_on(int device, int64_t stream) {
  static std::mutex mutex;
  static std::map<std::pair<int, int64_t>, int> asked;
  const std::lock_guard<std::mutex> lock(mutex);
  int& times = asked[{device, stream}];
  if (++times < kPatience) return false;
  times = 0;
  return true;
}

Event* as_event(void* event) { return static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;

  static int index(Device device) { return device.index() < 0 ? this_device : device.index(); }
  static Stream stream(int64_t id, int device) {
    return Stream(Stream::UNSAFE, Device(kType, static_cast<c10::DeviceIndex>(device)), id);
  }

  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return Device(kType, static_cast<c10::DeviceIndex>(this_device)); }
  void setDevice(Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) this_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  Stream getStream(Device device) const override { return stream(this_stream[index(device)], index(device)); }
  Stream getDefaultStream(Device device) const override { return stream(0, index(device)); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return stream(new_stream(), index(device)); }
  Stream getNewStream(Device device, int) const override { return stream(new_stream(), index(device)); }
  Stream exchangeStream(Stream next) const override {
    const Stream before = getStream(next.device());
    this_stream[index(next.device())] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const Stream& stream) const override {
    if (!asked_on(index(stream.device()), stream.id())) return false;
    add({Kind::query_stream, "cudaStreamQuery", index(stream.device()), stream.id()});
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    add({Kind::sync_stream, "cudaStreamSynchronize", index(stream.device()), stream.id()});
  }
  bool isStreamCapturing(const Stream&) const override { return false; }

  void record(void** event, const Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event();
    as_event(*event)->timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    as_event(*event)->time = std::chrono::steady_clock::now();
    as_event(*event)->recorded = tick();
    as_event(*event)->device = index(stream.device());
    as_event(*event)->stream = stream.id();
    as_event(*event)->asked = 0;
    add({Kind::record_event, "cudaEventRecord", index(stream.device()), stream.id(), as_event(*event)->number});
  }
  void block(void* event, const Stream& stream) const override {
    wait_event("cudaStreamWaitEvent", index(stream.device()), stream.id(), as_event(event)->number);
  }
  // A kernel here is over when it is launched; on a GPU it most often is not. So the answer is "not yet" unless the host
  // has waited for it: a program must be right then, too, and what it does only if the answer is yes orders nothing.
  bool queryEvent(void* raw) const override {
    if (raw == nullptr) return true;
    Event* event = as_event(raw);
    if (last_wait(event->device, event->stream) < event->recorded && ++event->asked < kPatience) return false;
    add({Kind::query_event, "cudaEventQuery", this_device, 0, event->number});
    return true;
  }
  void synchronizeEvent(void* event) const override {
    as_event(event)->asked = kPatience;
    add({Kind::sync_event, "cudaEventSynchronize", this_device, 0, as_event(event)->number});
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    add({Kind::sync_device, "cudaDeviceSynchronize", device < 0 ? this_device : device});
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete as_event(event); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(as_event(start)->timed && as_event(end)->timed,
                "Both events must be created with argument 'enable_timing=True'.");
    return std::chrono::duration<double, std::milli>(as_event(end)->time - as_event(start)->time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    const auto start = reinterpret_cast<uint64_t>(data.get());
    if (start) add({Kind::record_stream, "", index(stream.device()), stream.id(), 0, {{start, start + 1, false}}});
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// torch looks for a class of this name when it first asks for CUDA: it must be registered before.
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(this_device); }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    if (device >= 0) set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  at::Device getDeviceFromPtr(void* data) const override {
    return at::Device(kType, static_cast<c10::DeviceIndex>(device_of(data)));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? this_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? this_device : device);
  }
  void deviceSynchronize(c10::DeviceIndex device) const override { Guard().synchronizeDevice(device); }
  std::string showConfig() const override { return "simulated CUDA"; }
};
using at::CUDAHooksArgs;
using at::CUDAHooksInterface;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks);

}  // namespace

int device_count() { return devices; }
void set_device_count(int count) { devices = count; }

int current_device() { return this_device; }
void set_current_device(int device) {
  TORCH_CHECK(device < device_count(), "CUDA error: invalid device ordinal (cuda:", device, " of ", device_count(),
              " simulated devices)");
  if (device >= 0) this_device = device;
}

int64_t current_stream(int device) { return this_stream[device]; }
int64_t new_stream() { return streams++; }
int64_t new_event() { return events++; }

int64_t record_event(const char* name, int device, int64_t stream) {
  const int64_t event = new_event();
  add({Kind::record_event, name, device, stream, event});
  return event;
}

void wait_event(const char* name, int device, int64_t stream, int64_t event) {
  add({Kind::wait_event, name, device, stream, event});
}

}  // namespace simulated_cuda
