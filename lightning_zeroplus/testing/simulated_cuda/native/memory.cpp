#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "device.h"

namespace simulated_cuda {
namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kMostPoisoned = size_t{1} << 26;
constexpr int64_t kMostPieces = 1024;  // a tensor with more counts as one piece, from its first to its last byte
constexpr int kPinned = -1;            // in place of a device

struct Block {
  void* data;
  size_t bytes;
  int device;
  int64_t stream;
  at::Tensor keep;  // the CPU tensor whose memory this is; undefined if the memory is our own
};

std::mutex mutex;
std::map<uint64_t, Block*> blocks;
Usage usages[kMostDevices];  // guarded by the mutex

Entry entry_of(Kind kind, const Block& block) {
  const auto start = reinterpret_cast<uint64_t>(block.data);
  return {kind, block.device == kPinned ? "pinned" : "device", block.device, block.stream, 0,
          {{start, start + block.bytes, true}}};
}

void* allocate_host(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, kAlignment, std::max<size_t>(bytes, 1)) == 0, "CUDA out of memory: the host has no ",
              bytes, " bytes for the simulated device");
  return data;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->bytes) {
    add(entry_of(Kind::free, *block));
    const std::lock_guard<std::mutex> lock(mutex);
    blocks.erase(reinterpret_cast<uint64_t>(block->data));
    if (block->device != kPinned) {
      usages[block->device].bytes -= static_cast<int64_t>(block->bytes);
      usages[block->device].blocks--;
    }
  }
  if (!block->keep.defined()) std::free(block->data);
  delete block;
}

void count(Usage& usage, int64_t bytes) {
  usage.bytes += bytes;
  usage.total_bytes += bytes;
  usage.peak_bytes = std::max(usage.peak_bytes, usage.bytes);
  usage.blocks++;
  usage.total_blocks++;
  usage.peak_blocks = std::max(usage.peak_blocks, usage.blocks);
}

c10::DataPtr make_block(void* data, size_t bytes, int device, at::Tensor keep) {
  const bool pinned = device == kPinned;
  auto* block = new Block{data, bytes, device, pinned ? 0 : current_stream(device), std::move(keep)};
  if (bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      blocks[reinterpret_cast<uint64_t>(data)] = block;
      if (!pinned) count(usages[device], static_cast<int64_t>(bytes));
    }
    add(entry_of(Kind::allocate, *block));
  }
  const auto where = pinned ? c10::Device(c10::DeviceType::CPU)
                            : c10::Device(kType, static_cast<c10::DeviceIndex>(device));
  return c10::DataPtr(data, block, &free_block, where);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? allocate_host(bytes) : nullptr;
    if (bytes) memset(data, 0xff, std::min(bytes, kMostPoisoned));  // NaN, if it is read before it is written
    return make_block(data, bytes, current_device(), {});
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} the_device_allocator;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return make_block(allocate_host(bytes), bytes, kPinned, {}); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} the_pinned_allocator;

const bool registered = (c10::SetAllocator(kType, &the_device_allocator, 10), true);

const Block* block_at(const void* data) {
  const auto address = reinterpret_cast<uint64_t>(data);
  const std::lock_guard<std::mutex> lock(mutex);
  auto next = blocks.upper_bound(address);
  if (next == blocks.begin()) return nullptr;
  const Block* block = std::prev(next)->second;
  return address < std::prev(next)->first + block->bytes ? block : nullptr;
}

// The elements between the first and the last one of a tensor, both included.
int64_t extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return last + 1;
}

// Element counts of the pieces of a tensor that lie in one: their starts, and their common length.
std::pair<std::vector<int64_t>, int64_t> pieces(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t dim = 0; dim < tensor.dim(); dim++)
    if (tensor.size(dim) > 1 && tensor.stride(dim)) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  std::sort(dims.begin(), dims.end());
  int64_t run = 1;
  size_t dim = 0;
  for (; dim < dims.size() && dims[dim].first <= run; dim++) run += dims[dim].first * (dims[dim].second - 1);
  std::vector<int64_t> starts{0};
  for (; dim < dims.size(); dim++) {
    if (static_cast<int64_t>(starts.size()) * dims[dim].second > kMostPieces) return {{0}, extent(tensor)};
    std::vector<int64_t> more;
    for (const int64_t start : starts)
      for (int64_t index = 0; index < dims[dim].second; index++) more.push_back(start + index * dims[dim].first);
    starts = std::move(more);
  }
  return {starts, run};
}

void release_storage(void* storage) { delete static_cast<c10::Storage*>(storage); }

}  // namespace

c10::Allocator* device_allocator() { return &the_device_allocator; }
c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

bool is_pinned(const void* data) {
  const Block* block = block_at(data);
  return block != nullptr && block->device == kPinned;
}

int device_of(const void* data) {
  const Block* block = block_at(data);
  TORCH_CHECK(block != nullptr && block->device != kPinned, "The specified pointer resides on host memory and is not"
              " registered with any CUDA device.");
  return block->device;
}

Usage usage(int device) {
  const std::lock_guard<std::mutex> lock(mutex);
  return usages[device];
}

void reset_peak(int device) {
  const std::lock_guard<std::mutex> lock(mutex);
  usages[device].peak_bytes = usages[device].bytes;
  usages[device].peak_blocks = usages[device].blocks;
}

void log_blocks() {
  std::vector<Entry> entries;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [start, block] : blocks) entries.push_back(entry_of(Kind::allocate, *block));
  }
  for (auto& entry : entries) {
    entry.name += ", before the log";
    add(std::move(entry));
  }
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const int device = storage.device().index();
  const int before = current_device();
  set_current_device(device);
  auto data = the_device_allocator.allocate(bytes);
  set_current_device(before);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept) {
    const auto from = reinterpret_cast<uint64_t>(storage.data()), to = reinterpret_cast<uint64_t>(data.get());
    memcpy(data.get(), storage.data(), kept);
    add({Kind::kernel, "memcpy_d2d", device, current_stream(device), 0,
         {{from, from + kept, false}, {to, to + kept, true}}});
  }
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

at::Tensor on_host(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == c10::kStrided && tensor.has_storage(),
              "The simulated CUDA device has strided tensors only, not ", tensor.layout(), ".");
  const c10::Storage storage = tensor.storage();
  const auto needed = (tensor.storage_offset() + extent(tensor)) * static_cast<int64_t>(tensor.itemsize());
  TORCH_CHECK(!tensor.numel() || needed <= static_cast<int64_t>(storage.nbytes()),
              "CUDA error: an illegal memory access was encountered: a tensor of shape ", tensor.sizes(),
              " reaches to byte ", needed, " of a storage of ", storage.nbytes(),
              " bytes. Its memory was given back with `resize_`.");
  c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    c10::DataPtr(storage.mutable_data(), new c10::Storage(storage), &release_storage,
                                 c10::Device(c10::DeviceType::CPU)),
                    c10::GetAllocator(c10::DeviceType::CPU), true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

at::Tensor to_device(const at::Tensor& tensor, int device) {
  TORCH_CHECK(tensor.layout() == c10::kStrided && tensor.has_storage(),
              "The simulated CUDA device has strided tensors only, not ", tensor.layout(), ".");
  const c10::Storage& made = tensor.storage();
  c10::Storage storage(c10::Storage::use_byte_size_t(), made.nbytes(),
                       make_block(made.mutable_data(), made.nbytes(), device, tensor), device_allocator(), true);
  auto result =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(kKey), tensor.dtype());
  result.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return result;
}

void take_over(const at::Tensor& tensor, const at::Tensor& made, int device) {
  const c10::Storage& from = made.storage();
  if (from.nbytes() && from.data() != tensor.storage().data()) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(make_block(from.mutable_data(), from.nbytes(), device, made));
    storage->set_nbytes(from.nbytes());
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
}

void add_access(Entry& entry, const at::Tensor& tensor, bool write) {
  if (!tensor.defined() || !tensor.numel() || !tensor.has_storage() || !is_logging()) return;
  const auto size = static_cast<int64_t>(tensor.itemsize());
  const auto origin = reinterpret_cast<uint64_t>(tensor.storage().data()) + tensor.storage_offset() * size;
  const auto [starts, run] = pieces(tensor);
  for (const int64_t start : starts)
    entry.accesses.push_back({origin + start * size, origin + (start + run) * size, write});
}

}  // namespace simulated_cuda
