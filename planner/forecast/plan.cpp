#include "planner/forecast/plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "common/model_config.h"
#include "common/trouble.h"
#include "planner/forecast/plan_play.h"
#include "planner/forecast/plan_setup.h"
#include "planner/requests/request_sizes.h"
#include "planner/tokenizer/tokenizer.h"

namespace poise {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kSteps = 1'000'000;  // rows of requests that are scheduled at most
constexpr std::int32_t kRefills = 4;        // how many times the machine is filled, at most

// Evenly spread over the file, and enough to fill the machine several times.
std::vector<Request> some_of(std::span<const RequestSize> all, std::int32_t sequences) {
  double answers = 0;
  for (const RequestSize& one : all) {
    answers += one.answer;
  }
  const double each = std::max(1.0, answers / static_cast<double>(all.size()));
  const auto count = static_cast<std::size_t>(
      std::clamp<double>(std::min(static_cast<double>(kSteps) / each, double{kRefills} * sequences),
                         std::min<double>(3.0 * sequences, static_cast<double>(all.size())),
                         static_cast<double>(all.size())));
  std::vector<Request> some(count);
  for (std::size_t i = 0; i < count; ++i) {
    const RequestSize& one = all[i * all.size() / count];
    some[i].id = one.id;
    some[i].prompt.assign(static_cast<std::size_t>(one.prompt), TokenId{0});
    some[i].sampling.max_tokens = one.answer;
  }
  return some;
}

Json bytes_of(const Cost& cost, double times) {
  const auto whole = [&](double bytes) { return std::llround(times * bytes); };
  return {{"weights", whole(cost.weights)},
          {"kv", whole(cost.kv)},
          {"act", whole(cost.act)},
          {"stores", whole(cost.stores)}};
}

Json memory_of(const SetUp& made) {
  const BlockSizes sizes = block_sizes(made.shape, made.dtype);
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
  std::unique_ptr<const Tokenizer> tokenizer;
  if (!options.input.skip_tokenizer_init) {
    tokenizer = std::make_unique<const Tokenizer>(
        Tokenizer::load(options.input.model, model.shape.vocab_size));
  }
  const std::int32_t positions = model.shape.max_position_embeddings;
  const RequestSizes sizes = read_request_sizes(
      options.input.input,
      {.context = std::min(options.input.max_model_len.value_or(positions), positions),
       .vocab_size = model.shape.vocab_size,
       .tokenizer = tokenizer.get(),
       .run_seed = options.input.seed,
       .model = options.input.served_model_name});
  if (sizes.requests.empty()) {
    fail("{}: there is no request in it that could run{}{}", options.input.input.string(),
         sizes.first_refusal.empty() ? "" : "; ", sizes.first_refusal);
  }
  const SetUp made = set_up(options, model, sizes.requests);
  Player player(made, made.batch);
  const std::vector<Request> some = some_of(sizes.requests, made.demand.sequences);
  const Played played = play(made, player, some);
  const double times = stretch(played, sizes.requests.size(), played.most_rows);
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
          {"policy", made.policy_name},
          {"requests", sizes.requests.size()},
          {"refused_lines", sizes.refused},
          {"estimated", sizes.estimated},
          {"prompt_tokens", prompts},
          {"answer_tokens", answers},
          {"at_a_time", played.most_rows},
          {"blocks",
           {{"act", host.act_blocks},
            {"kv", host.kv_blocks},
            {"act_on_gpu", host.gpu_act_blocks},
            {"kv_on_gpu", host.gpu_kv_blocks}}},
          {"resident_layers", made.placement.device.resident_layers},
          {"layers", made.shape.num_hidden_layers},
          {"memory", memory_of(made)},
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
