#pragma once
// Failpoints: places where a test makes this process die, halt, or see a call fail. They are compiled into every
// build and off unless the environment asks; a point that is off costs one relaxed load. For tests alone.
//
//   POISE_FAILPOINTS        [PROGRAM/]POINT:ACTION[@N][+], separated by commas
//   POISE_FAILPOINTS_FIRED  a folder for notes of which entries have fired (optional)
//
// An entry fires the Nth time (default: the first) that its process reaches the point; with + also each later
// time. PROGRAM (loader, planner, gpu_executor) limits it to one program. With a folder of notes an entry
// without + fires once in all processes together, so that a successor is left alone; its note is the file
// FOLDER/INDEX. Unknown points, and actions that the point does not know, are refused at start (exit 2).
//
//   action                    | the process …
//   kill, stop, abort         | gets SIGKILL, SIGSTOP or SIGABRT; every point knows these
//   errno=E                   | sees the call fail with E (ENOSPC, EIO, …, or a number)
//   short=N                   | sees a write that takes N bytes
//   fail                      | gets no memory
//   drop, duplicate, reorder  | loses a message, sends it twice, sends it behind the next one
//   nan                       | computes a value that is not a number
//   delay=MS                  | waits that long before a call or a write
//   dies_of=ID, hangs_of=ID   | aborts, or computes for ever, if a work order has this input token
//
// `arm_failpoints` is called once, before other threads start; any thread may reach a point. The supervisor's
// points stand in launch/supervisor/shared/failpoints.py.

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <string_view>

namespace poise {

// What a point knows beside kill, stop and abort.
enum class PointKind : unsigned char {
  process,
  call,
  write,
  memory,
  message,
  arrival,
  number,
  pause,
  token
};

struct PointEntry {
  std::string_view name;
  PointKind kind;
  std::string_view numbers;  // kill point; fault (F) or invariant (I) that a test of it shows
};

inline constexpr PointEntry kFailpoints[] = {
    // Kill points, in the order in which a run passes them.
    {"loader.started", PointKind::process, "L1 F3"},           // no segment yet
    {"segment.unsized", PointKind::process, "L2 F3"},          // named and locked, of no size
    {"segment.uninitialised", PointKind::process, "L3 F3"},    // sized and mapped, all zeros
    {"loader.weight_copy", PointKind::process, "L4 F4"},       // some weights are there
    {"loader.unsealed", PointKind::process, "L5 F4"},          // all weights are there, unannounced
    {"loader.sealed", PointKind::process, "L6 F5"},            // announced
    {"loader.granting", PointKind::process, "L7 F5"},          // a pool is made, not yet granted
    {"loader.border_moved", PointKind::process, "L8 F5 F44"},  // ACT/KV border moved, unanswered
    {"loader.draining", PointKind::process, "L9 I9"},          // before segments are removed
    {"loader.unlinked", PointKind::process, "L10 I9"},         // after that, their memory held
    {"planner.validated", PointKind::process, "P1 F2"},        // input, run directory checked
    {"planner.order_made", PointKind::process, "P2 F2"},       // not sent
    {"planner.order_sent", PointKind::process, "P3 F2"},       // not acknowledged
    {"planner.between_iterations", PointKind::process, "F2"},
    {"planner.policy_swapped", PointKind::process, "P4 F44"},  // decided, neither noted nor logged
    {"planner.all_done", PointKind::process, "P5 I11"},        // every result on disk, unpublished
    {"executor.attached", PointKind::process, "E1 F1"},        // weights mapped
    {"executor.registering", PointKind::process, "E2 F1"},     // host memory mapped, unregistered
    {"executor.loading", PointKind::process, "E3 F1"},         // blocks on their way to the device
    {"executor.computing", PointKind::process, "E4 F1"},       // a layer half done
    {"executor.storing", PointKind::process, "E5 F1"},         // new rows on their way to the host
    {"executor.attending", PointKind::process, "E8 F1"},       // host cores at work
    {"executor.result_ready", PointKind::process, "E6 F1"},    // not sent
    {"executor.result_sent", PointKind::process, "E7 F1"},     // not taken in
    {"results.mid_line", PointKind::process, "W1 F57"},        // behind a write that was short
    {"results.written", PointKind::process, "W2 I11"},         // a line written, not durable
    {"results.before_rename", PointKind::process, "W3 I11"},   // publication noted, output missing
    // Calls that can fail.
    {"results.open", PointKind::call, "F55"},
    {"results.write", PointKind::write, "F55 F57"},
    {"results.sync", PointKind::call, "F56"},
    {"results.rename", PointKind::call, "F55"},
    {"results.copying", PointKind::pause, "F55"},  // to another file system; delay alone
    {"order_log.open", PointKind::call, "F55"},
    {"order_log.write", PointKind::write, "F55 F45"},
    {"replace_file.open", PointKind::call, "F55"},  // journal, manifest, status …
    {"replace_file.write", PointKind::write, "F55"},
    {"replace_file.sync", PointKind::call, "F56"},
    {"replace_file.rename", PointKind::call, "F55"},
    {"directory.sync", PointKind::call, "F56"},
    {"segment.open", PointKind::call, "F15 F34"},  // shm_open, new or not
    {"segment.size", PointKind::call, "F15"},      // ftruncate
    {"segment.reserve", PointKind::call, "F15"},   // posix_fallocate
    {"segment.map", PointKind::call, "F16"},       // mmap
    {"device.allocate", PointKind::memory, "F19"},
    {"device.allocate_host", PointKind::memory, "F16 F17"},
    {"device.stream", PointKind::memory, "F20"},      // work on a stream of the CPU device fails
    {"device.logits", PointKind::number, "F22"},      // of the CPU device
    {"executor.tokens", PointKind::token, "F9 F10"},  // of an iteration that is about to run
    {"channel.send", PointKind::message, "F42"},      // and EAGAIN: the peer's queue is full
    {"channel.receive", PointKind::arrival, "F42"},   // drop alone
};

// The index of a point; does not compile for a name that is not in the table.
class Failpoint {
 public:
  consteval Failpoint(const char* name) : index_(index_of(name)) {}  // NOLINT: a name is a point
  constexpr std::size_t index() const { return index_; }

 private:
  static consteval std::size_t index_of(std::string_view name) {
    std::size_t index = 0;
    while (kFailpoints[index].name != name) {
      ++index;
    }
    return index;
  }

  std::size_t index_;
};

struct Fault {
  enum class Kind : unsigned char {
    none,
    kill,
    stop,
    abort,
    error,
    short_write,
    no_memory,
    drop,
    duplicate,
    reorder,
    nan,
    delay,
    dies_of,
    hangs_of
  };
  Kind kind = Kind::none;
  int value = 0;  // behind the action's "="
};

namespace detail {
extern std::atomic<bool> failpoints_armed;
Fault reach(Failpoint point);
}  // namespace detail

// Reads the environment. Fails (Exit::cannot_start) where it asks for what does not exist.
void arm_failpoints();
// The same with these words; empty words disarm.
void arm_failpoints(std::string_view words, const std::string& folder_of_notes);

// What this process is to suffer here; it returns from neither kill nor abort, and has waited out a delay.
inline Fault failpoint(Failpoint point) {
  if (!detail::failpoints_armed.load(std::memory_order_relaxed)) [[likely]] {
    return {};
  }
  return detail::reach(point);
}

// Whether the call at this point is to fail; errno is set then.
bool fails_at(Failpoint point);

// write(2), or a part of it, or its failure.
ssize_t write_at(Failpoint point, int descriptor, const void* data, std::size_t size);

}  // namespace poise
