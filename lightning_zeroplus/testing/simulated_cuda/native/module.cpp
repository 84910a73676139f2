// What Python calls.
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "log.h"
#include "memory.h"

namespace simulated_cuda {

void bind_collectives(pybind11::module_& module);
void watch_host(bool watch);

namespace {

namespace py = pybind11;

void start(const py::object& locate) {
  start_log(locate.ptr());
  log_blocks();
  watch_host(true);
}

py::list stop() {
  watch_host(false);
  py::list result;
  for (const Entry& entry : stop_log()) {
    py::list reads, writes;
    for (const Access& access : entry.accesses)
      (access.write ? writes : reads).append(py::make_tuple(access.start, access.end));
    result.append(py::make_tuple(kind_name(entry.kind), entry.name, entry.device, entry.stream, entry.event,
                                 py::tuple(reads), py::tuple(writes), entry.place));
  }
  return result;
}

void resize(const py::object& storage, size_t bytes) {
  TORCH_CHECK_TYPE(THPStorage_Check(storage.ptr()), "expected a torch.UntypedStorage");
  resize_storage(THPStorage_Unpack(storage.ptr()), bytes);
}

}  // namespace

PYBIND11_MODULE(lightning_zeroplus_simulated_cuda, module) {
  // Whether torch has found the device: no, if it was asked for CUDA before this library was loaded.
  module.def("is_registered", [] { return at::detail::getCUDAHooks().hasCUDA(); });
  module.def("set_device_count", &set_device_count);
  module.def("get_device", &current_device);
  module.def("set_device", &set_current_device);
  module.def("synchronize", [](int device) { add({Kind::sync_device, "cudaDeviceSynchronize", device}); });
  module.def("default_generator", &default_generator);
  module.def("usage", [](int device) {
    const Usage used = usage(device);
    return py::make_tuple(py::make_tuple(used.bytes, used.peak_bytes, used.total_bytes),
                          py::make_tuple(used.blocks, used.peak_blocks, used.total_blocks));
  });
  module.def("reset_peak", &reset_peak);
  module.def("resize_storage", &resize);
  module.def("start", &start);
  module.def("stop", &stop);
  bind_collectives(module);
}

}  // namespace simulated_cuda
