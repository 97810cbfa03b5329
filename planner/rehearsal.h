#pragma once
// Iterations in virtual time, before there is any request or block: what a placement is
// worth, waiting included, for policies that compare several. The schedule, the packing and the
// tables are those of a run; the requests are taken to be all alike and halfway through their
// answers. Pure.

#include "common/device_memory.h"
#include "common/weight_layout.h"
#include "planner/cost_model.h"
#include "planner/policy.h"

namespace poise {

struct Rehearsal {
  Allocation host;
  DeviceLimits device;
  PackLimits pack;
  std::int32_t sequences = 0;    // wished under way; as many as there are blocks for are
  std::int64_t most_blocks = 0;  // of all those requests, at their ends
  std::int64_t prompt_rows = 0;  // of all their prompts
  std::int32_t wave_rows = 0;    // of prompts in an iteration
};
// Beyond kRehearsedBlocks, a part of the requests stands for all, and streamed weights take as small
// a part of their time.
inline constexpr std::int64_t kRehearsedBlocks = 16384;
Rehearsed rehearse(const Profile& profile, const Policy& policy, const WeightLayout& layout,
                   const Rehearsal& rehearsal);

}  // namespace poise
