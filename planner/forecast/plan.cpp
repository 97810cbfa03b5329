#include "planner/forecast/plan.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "common/files/json.h"
#include "common/model_config.h"
#include "common/trouble.h"
#include "planner/forecast/plan_play.h"
#include "planner/forecast/plan_setup.h"
#include "planner/requests/request_sizes.h"

namespace poise {
namespace {

using Json = nlohmann::ordered_json;

Json bytes_of(const Cost& cost, double times) {
  const auto whole = [&](double bytes) { return std::llround(times * bytes); };
  return {{"weights", whole(cost.weights)},
          {"kv", whole(cost.kv)},
          {"act", whole(cost.act)},
          {"stores", whole(cost.stores)}};
}

Json memory_of(const SetUp& made) {
  const BlockSizes sizes = block_sizes(made.shape, made.dtype, made.batch.kv_format);
  const Allocation& host = made.placement.host;
  const std::int64_t layers = made.shape.num_hidden_layers;
  Json gpu = Json::array();
  const DeviceMemoryPlan plan =
      plan_device_memory(made.shape, made.dtype, made.placement.device, made.overhead);
  for (const DeviceMemoryLine& line : plan.lines) {
    gpu.push_back({{"name", line.name}, {"bytes", line.bytes.n}, {"what", line.what}});
  }
  const auto blocks = [&](BlockKind kind, std::uint32_t count) {
    return sizes.block(kind).n * count * layers;
  };
  return {{"host",
           {{"weights", made.weights.n},
            {"act_blocks", blocks(BlockKind::act, host.act_blocks)},
            {"kv_blocks", blocks(BlockKind::kv, host.kv_blocks)},
            {"allowed", made.host_allowed.n}}},
          {"gpu", {{"lines", gpu}, {"total", plan.total.n}, {"allowed", made.cap.n}}}};
}

}  // namespace

nlohmann::ordered_json plan_run(const PlanOptions& options) {
  const ModelConfig model = read_model_config(options.input.model);
  if (options.check_only) {
    check_named(options, model);
    return nlohmann::ordered_json::object();
  }
  const RequestSizes sizes = sizes_of_requests(options, model);
  const SetUp made = set_up(options, model, sizes.requests);
  Player player(made, made.batch);
  const std::vector<Request> some = some_of(sizes.requests, made.demand.sequences);
  const Played played = play(made, player, some);
  const double times = stretch(played, sizes.requests.size(), std::max<std::int64_t>(played.at_a_time, 1));
  std::int64_t answers = 0, prompts = 0;
  for (const RequestSize& one : sizes.requests) {
    answers += one.answer;
    prompts += one.prompt;
  }
  const double seconds = times * played.total.seconds;
  const auto decoding = static_cast<double>(std::max<std::int64_t>(played.decoding, 1));
  const Allocation& host = made.placement.host;
  return {{"notes", made.notes},
          {"machine", made.profile.name},
          {"measured", !made.profile.measured.empty()},
          {"dtype", std::string(name_of(made.dtype))},
          {"kv_cache_dtype", std::string(name_of(made.batch.kv_format))},
          {"weights", made.shape.packed.is_packed() ? std::string(name_of(made.shape.packed.codes))
                                                    : std::string(name_of(made.dtype))},
          {"policy", made.policy_name},
          {"requests", sizes.requests.size()},
          {"refused_lines", sizes.refused},
          {"estimated", sizes.estimated},
          {"prompt_tokens", prompts},
          {"answer_tokens", answers},
          {"at_a_time", played.at_a_time},
          {"prompt_rows", made.batch.prompt_rows.value_or(made.batch.prefill_tokens)},
          {"blocks",
           {{"act", host.act_blocks},
            {"kv", host.kv_blocks},
            {"act_on_gpu", host.gpu_act_blocks},
            {"kv_on_gpu", host.gpu_kv_blocks}}},
          {"resident_layers", made.placement.device.resident_layers},
          {"layers", made.shape.num_hidden_layers},
          {"memory", memory_of(made)},
          {"decoding_at_a_time", played.most_rows},
          {"decode_iteration_seconds", played.decode.seconds / decoding},
          {"decode_tokens_per_second", played.decoding > 0 ? static_cast<double>(played.most_rows) *
                                                                 decoding / played.decode.seconds
                                                           : 0},
          {"decode_iteration_bytes", bytes_of(played.decode, 1 / decoding)},
          {"prefill_tokens_per_second",
           played.prefill_seconds > 0 ? played.prompt_rows / played.prefill_seconds : 0},
          {"prefill_seconds", times * played.prefill_seconds},
          {"tokens_per_second", static_cast<double>(answers) / seconds},
          {"bytes", bytes_of(played.total, times)},
          {"seconds", seconds},
          {"scheduled_requests", some.size()},
          {"played_iterations", player.played()}};
}

}  // namespace poise
