#include "common/liveness/progress.h"

#include <chrono>

namespace poise {
namespace {

constexpr auto kPublishEvery = std::chrono::milliseconds(200);

}  // namespace

ProgressPublisher::ProgressPublisher(ProgressWord& word)
    : thread_([this, &word](const std::stop_token& stop) {
        std::unique_lock lock(mutex_);
        while (!stop.stop_requested()) {
          if (take_progress()) {
            word.steps.fetch_add(1, std::memory_order_release);
          }
          over_.wait_for(lock, stop, kPublishEvery, [] { return false; });
        }
      }) {}

}  // namespace poise
