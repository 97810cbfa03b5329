#include "planner/forecast/plan_setup.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "common/trouble.h"
#include "common/words.h"
#include "planner/costs/costs.h"
#include "planner/costs/machine_file.h"
#include "planner/costs/measuring_build.h"
#include "planner/memory/planning_problem.h"
#include "planner/policies/default_policy.h"
#include "planner/tokenizer/tokenizer.h"

namespace poise {
namespace {

DType dtype_of(const PlanOptions& options, const ModelConfig& model) {
  return options.dtype.value_or(model.declared.value_or(DType::float32));
}

const char* where(std::optional<DeviceKind> device) {
  return !device ? "" : device == DeviceKind::cpu ? " on the CPU device" : " on a GPU";
}

// Of the machine or the file that was named, or the newest profile that was kept for model and device.
Profile costs_for(const PlanOptions& options, const ModelShape& shape, DType dtype) {
  const KvFormat kv_format = options.batch.kv_format;
  if (auto named = named_costs({options.machine, options.profile}, shape, dtype, kv_format)) {
    return *std::move(named);
  }
  KeptFor wanted{.shape = shape,
                 .dtype = dtype,
                 .device = options.device,
                 .build = measuring_build(),
                 .kv_format = kv_format};
  if (auto kept = newest_kept_profile(options.profile_dir, wanted)) {
    return std::move(kept->profile);
  }
  const std::string options_of_model = fmt::format(
      "--dtype {} --quantization {}{} --kv-cache-dtype {}", name_of(dtype),
      name_of(options.quantization),
      options.pack_weights == PackWeights::off ? "" : " --pack-weights auto", name_of(kv_format));
  wanted.build.reset();
  if (const auto kept = newest_kept_profile(options.profile_dir, wanted)) {
    fail(
        "what everything costs{} was measured by another build ({}): measure again with poise "
        "profile --model DIR {}, or name it, --profile {}",
        where(options.device), kept->profile.build.empty() ? "an older one" : kept->profile.build,
        options_of_model, kept->file.string());
  }
  fail(
      "what everything costs{} is not known: name a machine (--machine, one of {} or a file that "
      "describes one), a profile (--profile FILE), or measure this one with poise profile --model "
      "DIR {}",
      where(options.device), machine_names(), options_of_model);
}

// What the user allows, at most what the machine has; which is said where it is less.
Bytes capped(const char* option, std::optional<Bytes> allowed, Bytes there, SetUp& made) {
  if (allowed && *allowed > there) {
    made.notes.push_back(fmt::format("{} {}: {} has {}; planned with that", option,
                                     size_text(*allowed), made.profile.name, size_text(there)));
  }
  return std::min(allowed.value_or(there), there);
}

// Why ACT blocks save nothing here, where they do not.
std::optional<std::string> note_on_act(const SetUp& made, const Allocation& placed) {
  const KvFormat kv_format = made.batch.kv_format;
  const BlockSizes sizes = block_sizes(made.shape, made.dtype, kv_format);
  if (sizes.act_row < sizes.kv_row) {
    return std::nullopt;
  }
  const std::int32_t group = made.shape.num_attention_heads / made.shape.num_key_value_heads;
  const std::string quantized = fmt::format("keys and values are {}", name_of(kv_format));
  const std::string shared = fmt::format("{} query heads share a key", group);
  return fmt::format(
      "{}: in a layer a token takes {} as activations and {} as keys and values, so ACT blocks "
      "save "
      "no bytes on the link{}",
      kv_format == KvFormat::plain ? shared
      : group > 1                  ? shared + " and " + quantized
                                   : quantized,
      size_text(sizes.act_row), size_text(sizes.kv_row),
      placed.all_act_blocks() == 0 ? fmt::format(", and {} keeps KV", made.policy_name)
                                   : std::string());
}

// As the loader will keep it, unless it finds weights that cannot be packed.
ModelShape shape_of(const PlanOptions& options, const ModelConfig& model, DType dtype) {
  if (model.shape.packed.is_packed() && options.quantization != Quantization::automatic) {
    fail("{}: the checkpoint is quantised already: --quantization {} is for plain ones",
         shown(options.input.model.string()), name_of(options.quantization));
  }
  return model.shape.packed.is_packed()
             ? model.shape
             : quantized(model.shape, options.quantization, options.pack_weights, dtype);
}

}  // namespace

SetUp set_up(const PlanOptions& options, const ModelConfig& model,
             std::span<const RequestSize> requests) {
  SetUp made;
  made.dtype = dtype_of(options, model);
  made.shape = shape_of(options, model, made.dtype);
  made.profile = costs_for(options, made.shape, made.dtype);
  const bool device_is_host = made.profile.kind == DeviceKind::cpu;
  made.policy_name = policy_or_default(options.policy, device_is_host,
                                       {options.machine, options.profile}, options.policy_options);
  if (options.device && options.device != made.profile.kind) {
    made.notes.push_back(
        fmt::format("--device {}: the costs given are those of {}; planned for that",
                    name_of(*options.device), made.profile.name));
  }
  PolicyOptions policy_options = options.policy_options;
  policy_options.profile =
      deciding_costs(std::make_shared<const Profile>(made.profile), options.batch.absorption);
  made.policy = make_policy(made.policy_name, policy_options);
  made.weights = weight_layout(made.shape, made.dtype).total();
  made.cap = capped("--gpu-memory", options.gpu_memory, made.profile.gpu_memory, made);
  made.host_allowed = capped("--host-memory", options.host_memory, made.profile.host_memory, made);
  if (made.weights > made.host_allowed) {
    fail("host memory: the weights are {}, {}", size_text(made.weights),
         made.host_allowed < made.profile.host_memory
             ? size_text(made.host_allowed) + " are allowed: raise --host-memory"
             : fmt::format("{} has {}: take a machine that has more", made.profile.name,
                           size_text(made.host_allowed)));
  }
  PlanningProblem problem{
      .shape = made.shape,
      .dtype = made.dtype,
      .requests = {requests.begin(), requests.end()},
      .batch = options.batch,
      .budget = {.weights = made.weights,
                 .available = made.profile.host_memory - made.weights,
                 .host_memory = options.host_memory},
      .device = {.cap = made.cap,
                 .overhead = made.profile.gpu_overhead,
                 .is_host = device_is_host,
                 .holds_blocks = !device_is_host || options.gpu_memory.has_value(),
                 .attends_on_host = device_is_host || made.profile.knows_host()},
      .profile = std::make_shared<const Profile>(made.profile)};
  options.placement.add_to(problem.fixed.placement, made.shape.num_hidden_layers,
                           problem.device.holds_blocks);
  const RunPlan plan = solve(*made.policy, problem);
  made.batch = plan.batch;
  if (const auto note = note_on_act(made, plan.host)) {
    made.notes.push_back(*note);
  }
  made.demand = plan.demand;
  made.placement = {plan.host, plan.device};
  made.overhead = plan.overhead;
  made.weights =
      made.weights - weight_layout(made.shape, made.dtype).layer.bytes * plan.released_layers;
  return made;
}

RequestSizes sizes_of_requests(const PlanOptions& options, const ModelConfig& model) {
  std::unique_ptr<const Tokenizer> tokenizer;
  if (!options.input.skip_tokenizer_init) {
    tokenizer = std::make_unique<const Tokenizer>(
        Tokenizer::load(options.input.model, model.shape.vocab_size));
  }
  const std::int32_t positions = model.shape.max_position_embeddings;
  RequestSizes sizes = read_request_sizes(
      options.input.input,
      {.context = std::min(options.input.max_model_len.value_or(positions), positions),
       .vocab_size = model.shape.vocab_size,
       .tokenizer = tokenizer.get(),
       .run_seed = options.input.seed,
       .model = options.input.served_model_name},
      options.input.chat_prompts);
  if (sizes.requests.empty()) {
    fail("{}: there is no request in it that could run{}{}", options.input.input.string(),
         sizes.first_refusal.empty() ? "" : "; ", sizes.first_refusal);
  }
  return sizes;
}

void export_machine(const PlanOptions& options, const std::filesystem::path& output) {
  const ModelConfig model = read_model_config(options.input.model);
  const DType dtype = dtype_of(options, model);
  const ModelShape shape = shape_of(options, model, dtype);
  write_machine(
      output, machine_of(costs_for(options, shape, dtype), shape, dtype, options.batch.kv_format));
}

void check_named(const PlanOptions& options, const ModelConfig& model) {
  FixedPlacement placement;
  options.placement.add_to(placement, model.shape.num_hidden_layers,
                           options.device != DeviceKind::cpu || options.gpu_memory.has_value());
  check_absorption(model.shape, options.batch);
  if (options.dtype || model.declared) {
    const DType dtype = dtype_of(options, model);
    const ModelShape shape = shape_of(options, model, dtype);
    check_absorption(shape, options.batch);
    named_costs({options.machine, options.profile}, shape, dtype, options.batch.kv_format);
  } else if (options.profile) {  // the tensors decide in what they are kept
    read_profile(*options.profile);
  }
}

}  // namespace poise
