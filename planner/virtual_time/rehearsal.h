#pragma once
// Iterations in virtual time, before any request or block exists: the time of a placement, waits
// included, for policies that compare several. Schedule, packing and tables are those of a run. Single iterations are
// of identical requests. Pure.

#include <memory>
#include <optional>
#include <vector>

#include "common/device_memory.h"
#include "common/weight_layout.h"
#include "common/windows/unseen_blocks.h"
#include "planner/costs/cost_model.h"
#include "planner/policies/policy.h"
#include "planner/requests/request_size.h"
#include "planner/schedule/kept_context.h"

namespace poise {

struct Rehearsal {
  Allocation host;
  DeviceLimits device;
  PackLimits pack;
  std::int64_t requests = 0;      // in all
  std::shared_ptr<const std::vector<RequestSize>> each = nullptr;  // where they differ; see Demand
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
// them, with waits for blocks, preemptions and the last requests that run alone. Requests are as long as they are where
// `each` says it, and otherwise identical. One of several
// neighbouring iterations that are alike stands for the others. Nothing if there were more than
// kRehearsedIterations, or more than kRehearsedRequests at a time: waits are then a small part of a long
// run.
inline constexpr std::int64_t kRehearsedIterations = 2048;
inline constexpr std::int32_t kRehearsedRequests = 256;
inline constexpr std::int64_t kRehearsedAnswers = 8192;  // tokens of all answers, where requests differ
std::optional<Seconds> rehearse_job(const Profile& profile, const Policy& policy,
                                    const WeightLayout& layout, const Rehearsal& rehearsal);

}  // namespace poise
