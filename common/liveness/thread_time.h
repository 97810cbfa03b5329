#pragma once
// How long the calling thread had a core: what it waits, for a core or for anything else, is not counted.

#include <time.h>

#include <chrono>

namespace poise {

inline std::chrono::nanoseconds thread_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace poise
