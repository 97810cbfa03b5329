#include "kernels/cpu/workers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "common/liveness/progress.h"

namespace poise::test {
namespace {

TEST(Workers, RunEveryItemOnceWhateverTheirNumber) {
  for (const int threads : {1, 2, 3, 8}) {
    cpu::Workers workers(threads);
    EXPECT_EQ(workers.threads(), threads);
    for (const std::size_t count : {0, 1, 2, 7, 100, 3000}) {
      std::vector<int> runs(count, 0);  // an item belongs to one worker: no atomics
      workers.parallel_for(static_cast<std::int64_t>(count), [&](std::int64_t item, int worker) {
        ASSERT_LT(worker, threads);
        ++runs[static_cast<std::size_t>(item)];
      });
      EXPECT_EQ(runs, std::vector<int>(count, 1));
    }
  }
}

TEST(Workers, ShowTheCallerWhatTheyWroteJobAfterJob) {
  cpu::Workers workers(4);
  std::vector<std::int64_t> values(64, 0);
  for (int job = 0; job < 3000; ++job) {
    workers.parallel_for(
        64, [&](std::int64_t item, int) { values[static_cast<std::size_t>(item)] += item + job; });
  }
  for (std::int64_t item = 0; item < 64; ++item) {
    EXPECT_EQ(values[static_cast<std::size_t>(item)], 3000 * item + 2999 * 3000 / 2);
  }
}

// A product may take longer than the supervisor waits for any sign of life.
TEST(Workers, ShowWithinAJobThatTheyMove) {
  for (const int threads : {1, 2}) {
    cpu::Workers workers(threads);
    take_progress();
    std::atomic<int> noted = 0;
    workers.parallel_for(50, [&](std::int64_t, int) {
      noted += take_progress() ? 1 : 0;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    });
    EXPECT_GT(noted, 10) << threads << " threads";
  }
}

TEST(Workers, ShareTheWork) {
  cpu::Workers workers(2);
  std::atomic<int> inside = 0;
  // Two items that can only end together need two threads.
  workers.parallel_for(2, [&](std::int64_t, int) {
    ++inside;
    while (inside < 2) {
      std::this_thread::yield();
    }
  });
  EXPECT_EQ(inside, 2);
}

TEST(Workers, WakeFromSleep) {
  cpu::Workers workers(2);
  for (int round = 0; round < 3; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::atomic<int> inside = 0;
    workers.parallel_for(2, [&](std::int64_t, int) {
      ++inside;
      while (inside < 2) {
        std::this_thread::yield();
      }
    });
  }
}

TEST(Workers, ServeCallersOneAfterTheOther) {
  cpu::Workers workers(3);
  std::atomic<std::int64_t> total = 0;
  for (int caller = 0; caller < 4; ++caller) {
    std::thread([&] {
      workers.parallel_for(100, [&](std::int64_t item, int) { total += item; });
    }).join();
  }
  EXPECT_EQ(total, 4 * 4950);
}

TEST(Workers, HaveScratchOfTheirOwn) {
  cpu::Workers workers(3);
  for (int worker = 0; worker < 3; ++worker) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(workers.scratch(worker)) % 64, 0u);
    std::fill_n(workers.scratch(worker), static_cast<std::size_t>(cpu::Workers::kScratch.n),
                static_cast<std::byte>(worker));
  }
  EXPECT_EQ(workers.scratch(1)[0], std::byte{1});
  EXPECT_EQ(workers.scratch(0)[static_cast<std::size_t>(cpu::Workers::kScratch.n) - 1],
            std::byte{0});
}

}  // namespace
}  // namespace poise::test
