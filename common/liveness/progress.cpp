#include "common/liveness/progress.h"

#include <chrono>

namespace poise {
namespace {

constexpr auto kPublishEvery = std::chrono::milliseconds(200);
// A shorter one holds nobody up. Files are written again and again also where nothing moves (status.json): if one of those writes
// counted whenever a look falls into it, a standstill would not be seen.
constexpr std::chrono::steady_clock::duration kShortestDiskWait = std::chrono::milliseconds(400);
constexpr std::chrono::steady_clock::duration kLongestDiskWait = std::chrono::minutes(10);

bool waits_for_a_disk() {
  const std::int64_t since = detail::disk_awaited_since.load(std::memory_order_relaxed);
  const std::int64_t waited = std::chrono::steady_clock::now().time_since_epoch().count() - since;
  return since != 0 && waited >= kShortestDiskWait.count() && waited < kLongestDiskWait.count();
}

}  // namespace

ProgressPublisher::ProgressPublisher(ProgressWord& word)
    : thread_([this, &word](const std::stop_token& stop) {
        std::unique_lock lock(mutex_);
        while (!stop.stop_requested()) {
          if (take_progress() || waits_for_a_disk()) {
            word.steps.fetch_add(1, std::memory_order_release);
          }
          over_.wait_for(lock, stop, kPublishEvery, [] { return false; });
        }
      }) {}

}  // namespace poise
