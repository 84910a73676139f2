#include "log.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <utility>

namespace simulated_cuda {
namespace {

std::atomic<bool> logging{false};
std::mutex mutex;
std::vector<Entry> entries;
std::atomic<int64_t> ticks{0};
std::map<int, int64_t> waits_for_device;
std::map<std::pair<int, int64_t>, int64_t> waits_for_stream;
PyObject* locate_function = nullptr;  // changed only while the log is closed and the GIL is held

int64_t locate() {
  if (locate_function == nullptr || !Py_IsInitialized()) return -1;
  const PyGILState_STATE state = PyGILState_Ensure();
  // An operator may be running because an exception is being handled: keep that exception.
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  int64_t place = -1;
  if (PyObject* result = PyObject_CallNoArgs(locate_function)) {
    place = PyLong_AsLongLong(result);
    Py_DECREF(result);
  }
  if (PyErr_Occurred()) PyErr_WriteUnraisable(locate_function);
  PyErr_Restore(type, value, trace);
  PyGILState_Release(state);
  return place;
}

}  // namespace

const char* kind_name(Kind kind) {
  static const char* const names[] = {
      "kernel",        "collective",  "host",       "record_event", "wait_event",  "allocate",    "free",
      "record_stream", "sync_stream", "sync_event", "sync_device",  "query_event", "query_stream",
      "may_wait"};
  return names[static_cast<int>(kind)];
}

bool is_logging() { return logging; }

int64_t tick() { return ++ticks; }

int64_t last_wait(int device, int64_t stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  return std::max(waits_for_device[device], waits_for_stream[{device, stream}]);
}

void add(Entry entry) {
  if (entry.kind == Kind::sync_device || entry.kind == Kind::sync_stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    (entry.kind == Kind::sync_device ? waits_for_device[entry.device]
                                     : waits_for_stream[{entry.device, entry.stream}]) = tick();
  }
  if (!logging) return;
  if (entry.kind != Kind::free) entry.place = locate();
  const std::lock_guard<std::mutex> lock(mutex);
  entries.push_back(std::move(entry));
}

void start_log(PyObject* locate) {
  Py_XDECREF(locate_function);
  locate_function = locate == Py_None ? nullptr : Py_NewRef(locate);
  const std::lock_guard<std::mutex> lock(mutex);
  entries.clear();
  logging = true;
}

std::vector<Entry> stop_log() {
  logging = false;
  const std::lock_guard<std::mutex> lock(mutex);
  return std::exchange(entries, {});
}

}  // namespace simulated_cuda
