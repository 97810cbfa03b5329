#include "planner/record/log_extent.h"

#include <fmt/core.h>

#include "common/trouble.h"

namespace poise {
namespace {

const char* why_it_begins_late(LogGap gap) {
  switch (gap) {
    case LogGap::removed:
      return "earlier ones are not there (--orders-log-size removes the oldest)";
    case LogGap::off:
      return "before it --orders-log off was given";
    case LogGap::damage:
      return "what was before it was damaged and set aside when the run was resumed";
  }
  return "?";
}

// What to do for a log that can be replayed.
const char* remedy_for(LogGap gap) {
  switch (gap) {
    case LogGap::removed:
      return "record the run with a larger --orders-log-size, or without one";
    case LogGap::off:
      return "record the run anew with --orders-log full";
    case LogGap::damage:
      return "record the run anew, in another run directory";
  }
  return "?";
}

}  // namespace

std::string missing_text(const LogExtent& extent) {
  std::string text;
  const auto add = [&](const std::string& sentence) {
    text += (text.empty() ? "" : "; ") + sentence;
  };
  if (extent.begins_late()) {
    add(fmt::format("the log begins with segment {}: {}", extent.first_segment,
                    why_it_begins_late(extent.gap)));
  }
  if (extent.thin) {
    add("where --orders-log tables was given it has no orders of single layers and no reports on "
        "them");
  }
  if (extent.ends_early) {
    add("it stops before the run's end, where --orders-log off was given");
  }
  return text;
}

void require_replayable(const LogExtent& extent, const std::filesystem::path& log) {
  if (extent.begins_late()) {
    fail(
        "order log {} cannot be replayed: it begins with segment {}: {}; a replay needs every "
        "order from the run's beginning: {}",
        log.string(), extent.first_segment, why_it_begins_late(extent.gap), remedy_for(extent.gap));
  }
  if (extent.thin) {
    fail(
        "order log {} cannot be replayed: it has no orders of single layers (--orders-log tables); "
        "record the run with --orders-log full",
        log.string());
  }
}

}  // namespace poise
