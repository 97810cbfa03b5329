#pragma once
// Iterations in virtual time, before any request or block exists: the time of a placement, waits
// included, for policies that compare several. Schedule, packing and tables are those of a run; the
// requests are assumed to be identical and halfway through their
// answers. Pure.

#include <optional>

#include "common/device_memory.h"
#include "common/weight_layout.h"
#include "common/windows/unseen_blocks.h"
#include "planner/costs/cost_model.h"
#include "planner/policies/policy.h"
#include "planner/schedule/kept_context.h"

namespace poise {

struct Rehearsal {
  Allocation host;
  DeviceLimits device;
  PackLimits pack;
  std::int64_t requests = 0;      // in all
  std::int32_t sequences = 0;     // wished under way; limited by the number of blocks
  std::int64_t most_blocks = 0;   // of all those requests, at their ends
  std::int64_t most_tokens = 0;   // of their contexts, where some are dropped; 0: those of the blocks
  KeptContext kept = {};
  std::int64_t prompt_rows = 0;   // of all their prompts
  std::int32_t prefill_rows = 0;  // of prompts in an iteration
  std::int32_t prefill_rows_beside = INT32_MAX;  // … beside requests that generate
  LayerWindows windows;
};
// With more than kRehearsedBlocks blocks, a part of the requests stands for all, and streamed weights
// take the same part of their time.
inline constexpr std::int64_t kRehearsedBlocks = 16384;
Rehearsed rehearse(const Profile& profile, const Policy& policy, const WeightLayout& layout,
                   const Rehearsal& rehearsal);

// The whole job: all requests from their prompts to the ends of their answers, as a run would schedule
// them, with waits for blocks, preemptions and the last requests that run alone. One of several
// neighbouring iterations that are alike stands for the others. Nothing if there were more than
// kRehearsedIterations, or more than kRehearsedRequests at a time: waits are then a small part of a long
// run.
inline constexpr std::int64_t kRehearsedIterations = 2048;
inline constexpr std::int32_t kRehearsedRequests = 256;
std::optional<Seconds> rehearse_job(const Profile& profile, const Policy& policy,
                                    const WeightLayout& layout, const Rehearsal& rehearsal);

}  // namespace poise
