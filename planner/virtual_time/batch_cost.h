#pragma once
// The times of a mini-batch's loads, KV Gen and attention in a layer, by a profile, and of a row group's products. Pure.

#include "common/device_memory.h"
#include "common/messages_generated.h"
#include "planner/costs/cost_model.h"

namespace poise {

struct BatchCost {
  Seconds load_act, load_kv;  // its blocks over the link, one kind behind the other
  Seconds here;               // its ACT blocks on the device
  Seconds regenerate;
  Seconds attend;
  double stored_kv = 0, stored_act = 0;  // rows that leave over the link
  double kv = 0, act = 0;                // blocks over the link
  bool on_host = false;                  // host cores attend it: what follows instead of all before
  Seconds host, host_alone, up;  // … their work beside a busy link and an idle one; its output's way to the device
  double host_rows = 0;                  // that go down to them
  double host_blocks = 0;                // that they read
};

// A row group's products in a layer: Q, K and V of its rows; all.
struct GroupCost {
  Seconds qkv, forward;
};

// In a layer with this window; 0: without one. `limits`: of the executor's buffers.
BatchCost batch_cost(const Profile& profile, const messages::MiniBatchT& batch,
                     const DeviceLimits& limits, std::int32_t window);

}  // namespace poise
