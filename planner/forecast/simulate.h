#pragma once
// A run without processes, memory or GPU: the planner's own decisions (policy, sizes, schedule,
// packing, tables, weight stream) played in virtual time against a profile. Pure; any thread.

#include <cstdint>
#include <string_view>
#include <vector>

#include "common/model_shape.h"
#include "planner/costs/cost_model.h"
#include "planner/memory/sizes.h"
#include "planner/policies/policy.h"
#include "planner/virtual_time/virtual_executor.h"

namespace poise {

// Identical requests, each with max_tokens tokens to answer.
struct SimulatedWork {
  ModelShape shape{};
  DType dtype = DType::float16;
  std::int32_t requests = 0;
  std::int32_t prompt = 0;
  std::int32_t answer = 0;
  BatchOptions batch;
  FixedPlacement placement;  // as by --resident-layers, --percent and --gpu-blocks
  bool overlapped = false;   // what hides prompts under the link is chosen as in a run (memory/overlap.h)
  bool to_the_end = false;   // count everything, prompts and the last answers included
  bool traced = false;       // what the streams did in one iteration, halfway through `counted`
};

// Bytes from host to device.
struct LoadedBytes {
  double weights = 0, kv = 0, act = 0;
};

// Iterations of a kind, wherever they are in the work.
struct SimulatedPhase {
  std::int64_t iterations = 0;
  Seconds time{}, link{}, compute{};  // `link` and `compute`: how long each was busy
};
SimulatedPhase operator+(const SimulatedPhase& a, const SimulatedPhase& b);

struct SimulatedRun {
  Allocation host;
  DeviceLimits device;
  std::int32_t prompt_rows = 0;  // beside requests that generate
  std::int64_t iterations = 0;
  // While every request decodes: from the last prompt's end to the first answer's end. Over the whole
  // work, prompts included, if there is no such time or with `to_the_end`.
  std::int64_t counted = 0;  // iterations
  double tokens_per_second = 0;
  double link_busy = 0;  // shares of that time
  double compute_busy = 0;
  double host_busy = 0;
  LoadedBytes loaded;  // in that time
  std::vector<VirtualSpan> spans;
  double whole_tokens_per_second = 0;  // of all that was answered, from the first prompt to the end
  SimulatedPhase prompts, both, answers;  // iterations with prompts alone, with both, with answers alone
};

// Fails as a real run does if memory does not suffice.
SimulatedRun simulate(const Profile& profile, std::string_view policy, const PolicyOptions& options,
                      const SimulatedWork& work);

}  // namespace poise
