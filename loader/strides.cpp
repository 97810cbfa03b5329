#include "loader/strides.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "loader/weight_fill.h"

namespace poise {
namespace {

constexpr std::uint64_t kStride = 64 << 20;

}  // namespace

void for_each_stride(Bytes size,
                     const std::function<bool(std::uint64_t begin, std::uint64_t end)>& work) {
  const auto all = static_cast<std::uint64_t>(size.n);
  std::atomic<std::uint64_t> next{0};
  std::atomic<bool> stopped{false};
  const auto run = [&] {
    while (!stopped) {
      const std::uint64_t begin = next.fetch_add(kStride);
      if (begin >= all) {
        return;
      }
      if (!work(begin, std::min(begin + kStride, all))) {
        stopped = true;
      }
    }
  };
  std::vector<std::jthread> threads;
  for (std::size_t i = 1; i < fill_threads(); ++i) {
    threads.emplace_back(run);
  }
  run();
}

}  // namespace poise
