#pragma once
// Iterations in virtual time, before there is any request or block: what a placement is
// worth, waiting included, for policies that compare several. The schedule, the packing and the
// tables are those of a run; the requests are taken to be all alike and halfway through their
// answers. Pure.

#include <optional>

#include "common/device_memory.h"
#include "common/weight_layout.h"
#include "planner/costs/cost_model.h"
#include "planner/policies/policy.h"

namespace poise {

struct Rehearsal {
  Allocation host;
  DeviceLimits device;
  PackLimits pack;
  std::int64_t requests = 0;      // in all
  std::int32_t sequences = 0;     // wished under way; as many as there are blocks for are
  std::int64_t most_blocks = 0;   // of all those requests, at their ends
  std::int64_t prompt_rows = 0;   // of all their prompts
  std::int32_t prefill_rows = 0;  // of prompts in an iteration
};
// Beyond kRehearsedBlocks, a part of the requests stands for all, and streamed weights take as small
// a part of their time.
inline constexpr std::int64_t kRehearsedBlocks = 16384;
Rehearsed rehearse(const Profile& profile, const Policy& policy, const WeightLayout& layout,
                   const Rehearsal& rehearsal);

// All requests from their prompts to the ends of their answers, as a run would schedule them: who
// waits for whose blocks, who gives blocks back and begins again, who runs alone at the end. Of
// neighbouring iterations without prompts, one stands for a few. Nothing where it would take more
// than kRehearsedIterations, or more than kRehearsedRequests run at a time: what is waited for then is a
// small part of a long run.
inline constexpr std::int64_t kRehearsedIterations = 2048;
inline constexpr std::int32_t kRehearsedRequests = 256;
std::optional<Seconds> rehearse_job(const Profile& profile, const Policy& policy,
                                    const WeightLayout& layout, const Rehearsal& rehearsal);

}  // namespace poise
