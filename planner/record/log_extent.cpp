#include "planner/record/log_extent.h"

#include <fmt/core.h>

#include "common/trouble.h"

namespace poise {

std::string missing_text(const LogExtent& extent) {
  std::string text;
  const auto add = [&](const std::string& sentence) {
    text += (text.empty() ? "" : "; ") + sentence;
  };
  if (extent.begins_late()) {
    add(fmt::format(
        "the log begins with segment {}: --orders-log-size removed earlier ones, or --orders-log "
        "off or damage left a gap",
        extent.first_segment));
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
        "order log {} cannot be replayed: it begins with segment {}, and its orders load blocks "
        "that "
        "earlier ones stored; a replay needs every order from the run's beginning: record the run "
        "with a larger --orders-log-size, or without one",
        log.string(), extent.first_segment);
  }
  if (extent.thin) {
    fail(
        "order log {} cannot be replayed: it has no orders of single layers (--orders-log tables); "
        "record the run with --orders-log full",
        log.string());
  }
}

}  // namespace poise
