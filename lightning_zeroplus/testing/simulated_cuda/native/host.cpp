// What the host itself does with pinned memory, which copies of the device may use at the same time.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <memory>

#include "device.h"
#include "log.h"
#include "memory.h"

namespace simulated_cuda {
namespace {

bool touches_device(c10::ArrayRef<const c10::IValue> inputs) {
  for (const auto& value : inputs) {
    if (value.isTensor() && on_device(value.toTensor())) return true;
    if (value.isTensorList())
      for (const at::Tensor& each : value.toTensorVector())
        if (on_device(each)) return true;
  }
  return false;
}

void add_pinned(Entry& entry, const c10::IValue& value, bool write) {
  const auto one = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.device().is_cpu() && tensor.has_storage() && is_pinned(tensor.storage().data()))
      add_access(entry, tensor, write);
  };
  if (value.isTensor()) one(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& each : value.toTensorVector()) one(each);
}

// Reads no values: `empty_like` and the like.
bool makes_only(const std::string& name) {
  return name.find("_like") != std::string::npos || name.rfind("aten::new_", 0) == 0 || name == "aten::is_pinned" ||
         name == "aten::resize_" || name == "aten::set_";
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  const auto schema = function.operator_schema();
  const auto name = function.operator_name();
  if (!is_logging() || !schema || !name || makes_only(schema->name())) return nullptr;
  const auto op = c10::Dispatcher::singleton().findOp(*name);
  // The kernels, not the operators that consist of others: `to` reads nothing, the `copy_` that it calls does.
  if (!op || !(op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || name->name == "aten::copy_")) return nullptr;
  const auto inputs = function.inputs();
  if (touches_device(inputs)) return nullptr;  // kernels.cpp logs it
  Entry entry{Kind::host, schema->name(), current_device()};
  for (size_t i = 0; i < inputs.size() && i < schema->arguments().size(); i++) {
    const auto* alias = schema->arguments()[i].alias_info();
    if (alias && !alias->isWrite()) continue;  // a view
    add_pinned(entry, inputs[i], alias != nullptr);
  }
  if (!entry.accesses.empty()) add(std::move(entry));
  return nullptr;
}

at::CallbackHandle handle = 0;

}  // namespace

void watch_host(bool watch) {
  if (watch && !handle)
    handle = at::addGlobalCallback(
        at::RecordFunctionCallback(&before_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  if (!watch && handle) {
    at::removeCallback(handle);
    handle = 0;
  }
}

}  // namespace simulated_cuda
