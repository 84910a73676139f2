// Memory of the simulated device and pinned memory of the host, and the tensors that look at it.
#pragma once

#include <ATen/Tensor.h>

#include "log.h"

namespace simulated_cuda {

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

// Whether an address lies in pinned memory.
bool is_pinned(const void* data);
// The device that an address belongs to; raises if there is none.
int device_of(const void* data);

// Of a device's memory: what is allocated now, the most since reset_peak(), and all that ever was.
struct Usage {
  int64_t bytes, peak_bytes, total_bytes;
  int64_t blocks, peak_blocks, total_blocks;
};
Usage usage(int device);
void reset_peak(int device);

// One entry for each block that exists, as if it was allocated now.
void log_blocks();

// Gives a storage of the device another size. A smaller one frees memory, as on CUDA.
void resize_storage(const c10::Storage& storage, size_t bytes);

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::CUDA;
}

// A CPU tensor on the memory of a device tensor; raises if the tensor's storage has become too small for it.
at::Tensor on_host(const at::Tensor& tensor);

// A device tensor that takes over the memory of a CPU tensor, which a kernel has just made.
at::Tensor to_device(const at::Tensor& tensor, int device);

// Gives `tensor` the memory of a CPU tensor that a kernel has made in place of it (an `out=` that was resized).
void take_over(const at::Tensor& tensor, const at::Tensor& made, int device);

// The bytes that a tensor occupies, without the gaps between its rows, are added to the entry.
void add_access(Entry& entry, const at::Tensor& tensor, bool write);

}  // namespace simulated_cuda
