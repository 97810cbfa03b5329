#pragma once
// What the stages of an iteration work with; all of it is the pipeline's and outlives them.

#include <cstdint>

#include "gpu_executor/decoder.h"
#include "gpu_executor/device.h"
#include "gpu_executor/running_orders.h"
#include "gpu_executor/tracer.h"
#include "gpu_executor/weights_on_device.h"
#include "gpu_executor/work.h"

namespace poise {

struct StageParts {
  Device& device;
  Tracer& tracer;
  WeightsOnDevice& weights;
  Decoder& decoder;
  RunningOrders& orders;
  float* hidden;  // (max_rows, hidden_size): of all rows, from stage to stage
  const ModelShape& shape;

  float* hidden_of(const MiniBatchWork& batch) const {
    return hidden + batch.first_row * shape.hidden_size;
  }
};

}  // namespace poise
