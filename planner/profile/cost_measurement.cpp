#include "planner/profile/cost_measurement.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "common/trouble.h"
#include "planner/links/clock.h"

namespace poise {
namespace {

constexpr Seconds kUntilSpare{2};  // behind the executor's answer that the pool is unmapped
constexpr Seconds kBetweenLooks{0.005};

}  // namespace

CostMeasurement::CostMeasurement(ProfiledMachine machine, const ControlSegment& control,
                                 LoaderLink& loader, ExecutorLink& executor)
    : control_(control),
      loader_(loader),
      executor_(executor),
      profiler_(std::move(machine), control, loader, executor) {}

bool CostMeasurement::step(Seconds timeout) {
  switch (phase_) {
    case Phase::measuring:
      return profiler_.step(timeout);
    case Phase::giving_back: {
      const bool moved = loader_.step(timeout);
      if (!loader_.gives_back()) {
        profiler_.configure_untraced();  // there is no pool any more: the executor unmaps it
        phase_ = Phase::unmapping;
      }
      return moved;
    }
    case Phase::unmapping:
      return unmap();
    case Phase::gave_back:
      break;
  }
  return false;
}

void CostMeasurement::give_back() {
  check(done(), "a pool is given back once costs were measured with it");
  loader_.release();
  phase_ = Phase::giving_back;
}

// The loader sees a moment after the executor's answer that nobody maps the memory any more.
bool CostMeasurement::unmap() {
  const bool moved = profiler_.step_executor(kBetweenLooks);
  if (executor_.ready()) {
    unmapped_at_ = unmapped_at_.value_or(monotonic_now());
    const std::uint64_t spare = control_.spare_pool_bytes.load(std::memory_order_acquire);
    if (spare > 0 || monotonic_now() - *unmapped_at_ > kUntilSpare) {
      spdlog::info("the pool that costs were measured with is given back: {} bytes are spare",
                   spare);
      phase_ = Phase::gave_back;
    }
  }
  return moved;
}

}  // namespace poise
