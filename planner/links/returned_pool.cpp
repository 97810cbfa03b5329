#include "planner/links/returned_pool.h"

#include <spdlog/spdlog.h>

#include "planner/links/clock.h"

namespace poise {
namespace {

constexpr Seconds kUntilSpare{2};  // behind the executor's answer that the pool is unmapped

}  // namespace

bool ReturnedPool::is_spare() {
  if (!executor_.ready()) {
    return false;
  }
  unmapped_at_ = unmapped_at_.value_or(monotonic_now());
  const std::uint64_t spare = control_.spare_pool_bytes.load(std::memory_order_acquire);
  if (spare == 0 && monotonic_now() - *unmapped_at_ <= kUntilSpare) {
    return false;
  }
  spdlog::info("the pool is given back: {} bytes are spare", spare);
  return true;
}

}  // namespace poise
