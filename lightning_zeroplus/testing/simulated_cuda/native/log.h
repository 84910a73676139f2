// The log of everything that the simulated device does. Other files add entries; module.cpp hands them to Python.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

namespace simulated_cuda {

// The names that Python sees are in kind_name(), in the same order.
enum class Kind {
  kernel,
  collective,
  host,           // a CPU operator reads or writes pinned memory
  record_event,
  wait_event,
  allocate,
  free,
  record_stream,
  sync_stream,    // the host waits for a stream,
  sync_event,     // for an event,
  sync_device,    // for all streams of a device
  query_event,    // the host asks, and learns that the event is over
  query_stream,
  may_wait,       // the host may wait for a stream, and no program can rely on it
};

// Bytes that an operation reads or writes, as addresses.
struct Access {
  uint64_t start, end;
  bool write;
};

struct Entry {
  Kind kind;
  std::string name;
  int device = 0;
  int64_t stream = 0;
  int64_t event = 0;
  std::vector<Access> accesses;
  int64_t place = -1;  // what the function given to start_log() returned; -1: it was not asked
};

const char* kind_name(Kind kind);

bool is_logging();

// A time: what comes later has a larger number.
int64_t tick();

// When the host last waited for the stream or for its device, whether the log is open or not; 0: never.
int64_t last_wait(int device, int64_t stream);

// Adds an entry if the log is open. Asks for the place in the Python program, unless the entry is a free: memory is
// freed wherever its last reference goes, also where no Python may run.
void add(Entry entry);

// Opens the log. `locate` is None, or a function without arguments that returns an int.
void start_log(PyObject* locate);

// Closes the log and returns its entries.
std::vector<Entry> stop_log();

}  // namespace simulated_cuda
