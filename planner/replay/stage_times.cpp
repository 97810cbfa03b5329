#include "planner/replay/stage_times.h"

namespace poise {
namespace {

Seconds seconds_of(std::uint64_t ns) { return {static_cast<double>(ns) * 1e-9}; }

}  // namespace

void StageTimes::add(const messages::LayerDoneT& done) {
  if (done.stage >= stages_.size()) {
    return;
  }
  StageTime& time = stages_[done.stage];
  if (done.copy_in) {
    time.copy_in += seconds_of(done.copy_in->busy_ns());
    time.bytes_in += done.copy_in->bytes();
  }
  if (done.compute) {
    time.compute += seconds_of(done.compute->busy_ns());
    time.waits += seconds_of(done.compute->wait_ns());
  }
  if (done.copy_out) {
    time.copy_out += seconds_of(done.copy_out->busy_ns());
    time.bytes_out += done.copy_out->bytes();
  }
  if (done.host) {
    time.host += seconds_of(done.host->busy_ns());
  }
}

}  // namespace poise
