#include "planner/policies/work_time.h"

#include <algorithm>
#include <cmath>

namespace poise {
namespace {

// Weight of the work that is not an iteration's limit: it decides between otherwise equal placements.
constexpr double kTie = 1e-6;
// A layer's place on the device is in use all the time, a block's once its request has come so far.
constexpr double kStreamed = 0.03;

// A line's time for n, divided into `parts` calls.
double in_parts(const Line& line, double n, double parts) {
  return n > 0 ? parts * line(n / parts).n : 0;
}

double requests_of(const AllocationInputs& inputs, const Allocation& blocks) {
  const auto all = static_cast<double>(blocks.all_act_blocks() + blocks.all_kv_blocks());
  const auto most = static_cast<double>(std::max<std::int64_t>(inputs.most_blocks, 1));
  return std::max(1.0, inputs.sequences * all / most);
}

// Of the requests' contexts at their ends, dropped tokens included.
double tokens_of(const AllocationInputs& inputs) {
  return static_cast<double>(inputs.most_tokens > 0 ? inputs.most_tokens
                                                    : inputs.most_blocks * kBlockTokens);
}

// Of the tokens that a request's blocks hold at its end, how many they hold halfway through its answer.
double halfway(const AllocationInputs& inputs) {
  const double held = static_cast<double>(inputs.most_blocks * kBlockTokens);
  const double tokens = (static_cast<double>(inputs.prompt_rows) + tokens_of(inputs)) / 2;
  return held > 0 ? std::min(1.0, tokens / held) : 1;
}

// The same blocks for fewer requests.
Allocation share_of(const Allocation& blocks, double share) {
  const auto part = [&](std::uint32_t n) {
    return static_cast<std::uint32_t>(std::llround(n * share));
  };
  Allocation fewer = blocks;
  fewer.act_blocks = part(blocks.act_blocks);
  fewer.kv_blocks = part(blocks.kv_blocks);
  fewer.gpu_act_blocks = part(blocks.gpu_act_blocks);
  fewer.gpu_kv_blocks = part(blocks.gpu_kv_blocks);
  return fewer;
}

double decoding_score(const Profile& profile, const AllocationInputs& inputs,
                      const Allocation& blocks) {
  const IterationTime time = iteration_time(profile, inputs, blocks);
  return time.longest().n + kTie * (time.link + time.compute).n;
}

}  // namespace

IterationTime iteration_time(const Profile& profile, const AllocationInputs& inputs,
                             const Allocation& blocks) {
  // Those on the device fill first.
  const double filled = halfway(inputs);
  const double act = filled * static_cast<double>(blocks.all_act_blocks());
  const double kv = filled * static_cast<double>(blocks.all_kv_blocks());
  const double host_act = std::max(0.0, act - blocks.gpu_act_blocks);
  const double host_kv = std::max(0.0, kv - blocks.gpu_kv_blocks);
  const double all = act + kv;
  const double parts =
      inputs.mini_batch > 0 ? std::max(1.0, std::ceil(all / inputs.mini_batch)) : 1.0;
  const double requests = requests_of(inputs, blocks);
  const double layers = inputs.layers;
  const double streamed = layers - blocks.resident_layers.value_or(0);
  const double host_blocks = filled * static_cast<double>(inputs.host_blocks);
  const Seconds attended = profile.host_attention(host_blocks);
  const Profile::LinkTime link{
      .kv = {layers * in_parts(profile.load_kv, host_kv, parts)},
      .rest = {layers * in_parts(profile.load_act, host_act, parts) +
               streamed * profile.load_w(1).n}};
  const Profile::Paces paces =
      inputs.host_requests > 0
          ? profile.paces({.kv = link.kv / layers, .rest = link.rest / layers}, attended,
                          profile.host_alone(host_blocks))
          : Profile::Paces();
  const Line& attention = profile.attention_beside(blocks.gpu_act_blocks > 0);
  // Rows of requests that host cores attend are multiplied with the others'.
  const double on_host = inputs.host_requests;
  const double rows = requests + on_host;
  const double up = profile.host_up(on_host).n;
  const double attended_here =
      profile.answers_absorb && act > 0
          ? parts * profile.absorb_of(act / parts, std::min(requests, act) / parts).n +
                in_parts(attention, kv, parts)
          : in_parts(profile.kv_gen, act, parts) + in_parts(attention, all, parts);
  const double compute = attended_here + profile.forward_of(rows).n + up;
  const double host = on_host > 0 ? attended.n * paces.host + profile.host_down(on_host).n + up +
                                        profile.forward_of(rows).n
                                  : 0;
  const double back = profile.store_act(requests * host_act / std::max(all, 1.0)).n +
                      profile.store_kv(requests * host_kv / std::max(all, 1.0)).n +
                      profile.host_down(on_host).n;
  return {.link = (link.kv + link.rest) * paces.link,
          .compute = {layers * compute + profile.head(rows).n},
          .back = {layers * back},
          .host = {layers * host}};
}

Rehearsed least_times(const Profile& profile, const AllocationInputs& inputs,
                      const Allocation& blocks) {
  const double streamed = inputs.layers - blocks.resident_layers.value_or(0);
  const double rows =
      std::min<double>(inputs.prefill_rows, static_cast<double>(inputs.prompt_rows));
  return {.decoding = {decoding_score(profile, inputs, blocks)},
          .prefill = {std::max(streamed * profile.load_w(1).n,
                               inputs.layers * profile.forward_of(rows).n)}};
}

std::int64_t rounds_of(const AllocationInputs& inputs, const Allocation& blocks) {
  const auto together =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(requests_of(inputs, blocks) + 1e-9), 1,
                               std::max(inputs.sequences, 1));
  return ceil_div(std::max<std::int64_t>(inputs.requests, inputs.sequences), together);
}

double work_time(const Profile& profile, const AllocationInputs& inputs, const Allocation& blocks,
                 const Rehearsed& times) {
  const double sequences = std::max(inputs.sequences, 1);
  const double all = std::max(static_cast<double>(inputs.requests), sequences);
  const double of_blocks = requests_of(inputs, blocks);
  const double together = std::clamp(std::floor(of_blocks + 1e-9), 1.0, sequences);
  const double rounds = std::floor(all / together);
  const double rest = all - rounds * together;
  const double last =
      rest == 0 ? 0 : decoding_score(profile, inputs, share_of(blocks, rest / of_blocks)) / 2;
  const double prompt = static_cast<double>(inputs.prompt_rows) / sequences;
  const double tokens = tokens_of(inputs) / sequences;
  const double answer = std::max(1.0, tokens - prompt);
  const double chunks = inputs.prefill_rows > 0 ? std::ceil(prompt * all / inputs.prefill_rows) : 0;
  const double flowing = all / std::min(of_blocks, sequences) * times.decoding.n;
  const double in_rounds = rounds * times.decoding.n + last;
  const double streamed = inputs.layers - blocks.resident_layers.value_or(0);
  return chunks * times.prefill.n + answer * std::max(flowing, in_rounds) *
                                        (1 + kStreamed * streamed / std::max(inputs.layers, 1));
}

}  // namespace poise
