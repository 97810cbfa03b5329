#include "planner/profile/cost_measurement.h"

#include <utility>

#include "common/trouble.h"

namespace poise {
namespace {

constexpr Seconds kBetweenLooks{0.005};

}  // namespace

CostMeasurement::CostMeasurement(ProfiledMachine machine, const ControlSegment& control,
                                 LoaderLink& loader, ExecutorLink& executor)
    : loader_(loader),
      profiler_(std::move(machine), control, loader, executor),
      returned_(control, executor) {}

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
    case Phase::unmapping: {
      const bool moved = profiler_.step_executor(kBetweenLooks);
      if (returned_.is_spare()) {
        phase_ = Phase::gave_back;
      }
      return moved;
    }
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

}  // namespace poise
