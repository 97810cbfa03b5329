#pragma once
// Three ways to report a problem. `std::optional`: there is no value, and the caller continues.
// `fail`: a file, an option or the machine is wrong; one sentence for the user. main prints it and ends;
// who can go on without what failed catches it earlier. `check`: the program has a defect; always on, also
// in release builds. Both throw, so that destructors run; any thread may call them.

#include <fmt/core.h>

#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace poise {

// The exit codes a process of poise ends with. For a command without a run the user sees them as they are.
// In a run the supervisor decides (launch/supervisor/lifecycle: children.py, supervision.py): 70, 77 and 78
// become 75, and so does 2 once the run has begun.
// A new code also belongs in launch/supervisor/shared/trouble.py (which supervisor and help take it from)
// and in the table of launch/README.md; tests/e2e/house_rules.py compares the three.
enum class Exit : int {
  done = 0,          // every input line has its result line
  wrong = 1,         // `inspect --check` found an order that cannot be right, `--diff` a difference
  cannot_start = 2,  // options, model or input file are wrong
  internal = 70,     // a check failed: a defect of ours
  busy = 73,         // the output cannot be written
  locked = 74,       // another run holds this directory
  interrupted = 75,  // resumable with --resume
  handed_over =
      77,        // a planner or loader left its work to the next one, which the supervisor starts
  device_failed = 78,  // of an executor: its device does no more work; another executor may go on
  foreign = 76,        // the other side, or the run directory, is of another build, model or input
  unpackable = 79,     // of a loader: its weights cannot be packed; another one loads them plain
};

// What `fail` throws: a sentence that names the culprit, the rule and the remedy, and the code to
// end with.
class Failure : public std::runtime_error {
 public:
  explicit Failure(const std::string& sentence, Exit code = Exit::cannot_start)
      : std::runtime_error(sentence), code_(code) {}
  Exit code() const { return code_; }

 private:
  Exit code_;
};

// What `check` throws: a broken invariant, with its source location.
class Defect : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> sentence, Args&&... args) {
  throw Failure(fmt::format(sentence, std::forward<Args>(args)...));
}

template <typename... Args>
[[noreturn]] void fail(Exit code, fmt::format_string<Args...> sentence, Args&&... args) {
  throw Failure(fmt::format(sentence, std::forward<Args>(args)...), code);
}

inline void check(bool condition, std::string_view invariant,
                  std::source_location where = std::source_location::current()) {
  if (condition) [[likely]] {
    return;
  }
  throw Defect(
      fmt::format("broken invariant: {} ({}:{})", invariant, where.file_name(), where.line()));
}

}  // namespace poise
