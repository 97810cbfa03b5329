#include "planner/virtual_time/prediction.h"

#include "planner/record/balance.h"

namespace poise {

LinkIdle Prediction::begin(const messages::IterationT& tables, bool last, Seconds now) {
  if (since_.n < 0) {
    since_ = now;
  }
  decoding_ = kind_of(tables).decodes;
  const Seconds before = executor_.now();
  LinkIdle idle = executor_.run(tables, last);
  predicted_ = executor_.now() - before;
  return idle;
}

void Prediction::done(Seconds now) {
  const Seconds measured = now - since_;
  since_ = now;
  figures_.predicted += predicted_;
  figures_.measured += measured;
  if (decoding_) {
    ++figures_.decoding;
    figures_.decode_predicted += predicted_;
    figures_.decode_measured += measured;
  }
}

}  // namespace poise
