// Devices, streams, events and random numbers.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace simulated_cuda {

constexpr auto kType = c10::DeviceType::CUDA;
constexpr auto kKey = c10::DispatchKey::CUDA;
constexpr int kMostDevices = 16;

int device_count();
void set_device_count(int count);

// The current device of this thread.
int current_device();
void set_current_device(int device);

// The current stream of this thread on a device. Stream 0 is the default stream of each device.
int64_t current_stream(int device);
int64_t new_stream();
int64_t new_event();

// A number for an event that has just been recorded on a stream, and a wait for it.
int64_t record_event(const char* name, int device, int64_t stream);
void wait_event(const char* name, int device, int64_t stream, int64_t event);

// Random numbers as on CUDA: a seed and an offset, which each kernel that draws advances. The state has 16 bytes.
const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// A generator for the CPU's kernel, from the next offset of a device's generator.
at::Generator draw(const at::Generator& device_generator);

// Lets kernels that take no generator, such as native_dropout, draw from a device's default generator.
class DrawFromDevice {
 public:
  explicit DrawFromDevice(int device);
  ~DrawFromDevice();
  DrawFromDevice(const DrawFromDevice&) = delete;
  DrawFromDevice& operator=(const DrawFromDevice&) = delete;

 private:
  at::Generator cpu_;
  c10::intrusive_ptr<c10::TensorImpl> state_;
};

}  // namespace simulated_cuda
