#include "common/testing/failpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <chrono>
#include <cstring>
#include <deque>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>

#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::pair<std::string_view, int> kErrors[] = {
    {"EACCES", EACCES}, {"EAGAIN", EAGAIN}, {"EDQUOT", EDQUOT}, {"EFBIG", EFBIG},
    {"EINTR", EINTR},   {"EIO", EIO},       {"EMFILE", EMFILE}, {"ENOENT", ENOENT},
    {"ENOMEM", ENOMEM}, {"ENOSPC", ENOSPC}, {"EROFS", EROFS},
};

struct ArmedFault {
  std::size_t point;
  Fault fault;
  std::uint64_t nth;
  bool each_later;
  std::size_t index;  // in the list
  std::atomic<std::uint64_t> times_reached{0};
};

std::deque<ArmedFault> armed_faults;  // written by arm_failpoints alone; atomics do not move
std::string notes_folder;

[[noreturn]] void refuse_failpoint(std::string_view entry, std::string_view why) {
  fail("POISE_FAILPOINTS: \"{}\" {} (common/testing/failpoint.h)", entry, why);
}

std::optional<int> number_in(std::string_view word) {
  int number = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  return error == std::errc() && end == word.data() + word.size() ? std::optional(number)
                                                                  : std::nullopt;
}

std::optional<Fault> fault_named(std::string_view word) {
  using Kind = Fault::Kind;
  constexpr std::pair<std::string_view, Kind> kPlain[] = {
      {"kill", Kind::kill},           {"stop", Kind::stop},   {"abort", Kind::abort},
      {"fail", Kind::no_memory},      {"drop", Kind::drop},   {"duplicate", Kind::duplicate},
      {"reorder", Kind::reorder},     {"nan", Kind::nan},
  };
  for (const auto& [name, kind] : kPlain) {
    if (word == name) {
      return Fault{kind, 0};
    }
  }
  const std::size_t equals = std::min(word.find('='), word.size());
  const std::string_view value = word.substr(std::min(equals + 1, word.size()));
  constexpr std::pair<std::string_view, Kind> kNumbered[] = {
      {"short", Kind::short_write},
      {"delay", Kind::delay},
      {"dies_of", Kind::dies_of},
      {"hangs_of", Kind::hangs_of},
  };
  for (const auto& [name, kind] : kNumbered) {
    if (word.substr(0, equals) == name) {
      const auto number = number_in(value);
      return number && *number > 0 ? std::optional(Fault{kind, *number}) : std::nullopt;
    }
  }
  if (word.starts_with("errno=")) {
    const auto* known = std::ranges::find(kErrors, value, [](const auto& one) { return one.first; });
    const auto error = known != std::end(kErrors) ? std::optional(known->second) : number_in(value);
    return error && *error > 0 ? std::optional(Fault{Kind::error, *error}) : std::nullopt;
  }
  return std::nullopt;
}

bool knows(PointKind point, Fault::Kind fault) {
  switch (fault) {
    case Fault::Kind::none:
    case Fault::Kind::kill:
    case Fault::Kind::stop:
    case Fault::Kind::abort:
      return true;
    case Fault::Kind::error:
      return point == PointKind::call || point == PointKind::write || point == PointKind::message;
    case Fault::Kind::short_write:
      return point == PointKind::write;
    case Fault::Kind::no_memory:
      return point == PointKind::memory;
    case Fault::Kind::drop:
      return point == PointKind::message || point == PointKind::arrival;
    case Fault::Kind::duplicate:
    case Fault::Kind::reorder:
      return point == PointKind::message;
    case Fault::Kind::nan:
      return point == PointKind::number;
    case Fault::Kind::delay:
      return point == PointKind::call || point == PointKind::write || point == PointKind::pause;
    case Fault::Kind::dies_of:
    case Fault::Kind::hangs_of:
      return point == PointKind::token;
  }
  return false;
}

// "poise-gpu-executor" is gpu_executor.
std::string this_program() {
  std::string name = program_invocation_short_name;
  if (name.starts_with("poise-")) {
    name.erase(0, std::strlen("poise-"));
  }
  std::ranges::replace(name, '-', '_');
  return name;
}

void arm_one(std::string_view entry, std::size_t index) {
  std::string_view rest = entry;
  std::string_view program;
  if (const auto slash = rest.find('/'); slash != std::string_view::npos) {
    program = rest.substr(0, slash);
    rest.remove_prefix(slash + 1);
  }
  const bool each_later = rest.ends_with('+');
  rest.remove_suffix(each_later ? 1 : 0);
  std::uint64_t nth = 1;
  if (const auto at = rest.find('@'); at != std::string_view::npos) {
    const auto number = number_in(rest.substr(at + 1));
    if (!number || *number < 1) {
      refuse_failpoint(entry, "names no time to fire: @N counts from 1");
    }
    nth = static_cast<std::uint64_t>(*number);
    rest = rest.substr(0, at);
  }
  const auto colon = rest.find(':');
  const std::string_view name = rest.substr(0, colon);
  if (name.starts_with("supervisor.")) {
    return;
  }
  const auto* point = std::ranges::find(kFailpoints, name, &PointEntry::name);
  if (point == std::end(kFailpoints)) {
    refuse_failpoint(entry, "names no failpoint");
  }
  const auto fault = fault_named(colon == std::string_view::npos ? "" : rest.substr(colon + 1));
  if (!fault || !knows(point->kind, fault->kind)) {
    refuse_failpoint(entry, "names no action of that failpoint");
  }
  if (program.empty() || program == this_program()) {
    armed_faults.emplace_back(static_cast<std::size_t>(point - std::begin(kFailpoints)), *fault,
                              nth, each_later, index);
  }
}

// Whether this process is the one in which the entry fires.
bool note_firing(const ArmedFault& armed) {
  if (notes_folder.empty()) {
    return true;
  }
  const std::string path = fmt::format("{}/{}", notes_folder, armed.index);
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (descriptor < 0) {
    return armed.each_later;
  }
  const std::string note =
      fmt::format("{} {}\n", this_program(), kFailpoints[armed.point].name);
  static_cast<void>(::write(descriptor, note.data(), note.size()) + 1);
  ::close(descriptor);
  return true;
}

}  // namespace

namespace detail {

std::atomic<bool> failpoints_armed{false};

Fault reach(Failpoint point) {
  Fault fault;
  for (ArmedFault& armed : armed_faults) {
    if (armed.point != point.index()) {
      continue;
    }
    const std::uint64_t time = ++armed.times_reached;
    const bool due = armed.each_later ? time >= armed.nth : time == armed.nth;
    if (due && note_firing(armed)) {
      fault = armed.fault;
    }
  }
  switch (fault.kind) {
    case Fault::Kind::kill:
      ::kill(::getpid(), SIGKILL);
      break;
    case Fault::Kind::stop:
      ::kill(::getpid(), SIGSTOP);
      return {};
    case Fault::Kind::abort:
      std::abort();
    case Fault::Kind::delay:
      std::this_thread::sleep_for(std::chrono::milliseconds(fault.value));
      return {};
    default:
      break;
  }
  return fault;
}

}  // namespace detail

void arm_failpoints() {
  const char* words = std::getenv("POISE_FAILPOINTS");
  const char* folder = std::getenv("POISE_FAILPOINTS_FIRED");
  arm_failpoints(words != nullptr ? words : "", folder != nullptr ? folder : "");
}

void arm_failpoints(std::string_view words, const std::string& folder_of_notes) {
  detail::failpoints_armed.store(false);
  armed_faults.clear();
  notes_folder = folder_of_notes;
  for (std::size_t index = 0; !words.empty(); ++index) {
    const std::size_t comma = std::min(words.find(','), words.size());
    arm_one(words.substr(0, comma), index);
    words.remove_prefix(std::min(comma + 1, words.size()));
  }
  detail::failpoints_armed.store(!armed_faults.empty());
}

bool fails_at(Failpoint point) {
  const Fault fault = failpoint(point);
  if (fault.kind == Fault::Kind::error) {
    errno = fault.value;
    return true;
  }
  return fault.kind == Fault::Kind::no_memory;
}

ssize_t write_at(Failpoint point, int descriptor, const void* data, std::size_t size) {
  const Fault fault = failpoint(point);
  if (fault.kind == Fault::Kind::error) {
    errno = fault.value;
    return -1;
  }
  if (fault.kind == Fault::Kind::short_write) {
    size = std::min(size, static_cast<std::size_t>(fault.value));
  }
  return ::write(descriptor, data, size);
}

}  // namespace poise
