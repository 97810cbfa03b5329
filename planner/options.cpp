#include "planner/options.h"

#include <vector>

#include "common/arguments.h"
#include "common/trouble.h"
#include "common/words.h"
#include "planner/costs/machine_file.h"
#include "planner/forecast/simulate_papers.h"
#include "planner/memory/planning_problem.h"

namespace poise {
namespace {

constexpr std::int64_t kMaxOf = 1 << 24;  // of sequences, rows or tokens

// A whole number as people write one: digits alone.
std::uint64_t number(const cxxopts::ParseResult& given, const std::string& name,
                     std::uint64_t least, std::uint64_t most) {
  const auto text = given[name].as<std::string>();
  std::uint64_t value = 0;
  bool good = !text.empty() && text.size() <= 20;
  for (const char digit : text) {
    good = good && digit >= '0' && digit <= '9' && !__builtin_mul_overflow(value, 10, &value) &&
           !__builtin_add_overflow(value, static_cast<std::uint64_t>(digit - '0'), &value);
  }
  if (!good || value < least || value > most) {
    fail("--{} {}: a whole number from {} to {} is wanted", name, text, least, most);
  }
  return value;
}

template <typename T>
void take_number(const cxxopts::ParseResult& given, const std::string& name, std::uint64_t least,
                 std::uint64_t most, T& into) {
  if (given.count(name) != 0) {
    into = static_cast<T>(number(given, name, least, most));
  }
}

void take_bytes(const cxxopts::ParseResult& given, const std::string& name,
                std::optional<Bytes>& into) {
  if (given.count(name) != 0) {
    into = Bytes{static_cast<std::int64_t>(number(given, name, 1, INT64_MAX))};
  }
}

double share(const cxxopts::ParseResult& given, const std::string& name) {
  const auto text = given[name].as<std::string>();
  std::size_t used = 0;
  double value = -1;
  try {
    value = std::stod(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used != text.size() || used == 0 || !(value >= 0 && value <= 1)) {
    fail("--{} {}: a number from 0 to 1 is wanted", name, text);
  }
  return value;
}

void add_input(cxxopts::Options& options) {
  options.add_options()("model", "a HuggingFace model directory", cxxopts::value<std::string>())(
      "i,input-file", "requests, one OpenAI batch line each", cxxopts::value<std::string>())(
      "max-model-len", "tokens of prompt and answer together", cxxopts::value<std::string>())(
      "seed", "of requests that name none", cxxopts::value<std::string>())(
      "served-model-name", "of results; a request that names another is an error",
      cxxopts::value<std::string>())("skip-tokenizer-init",
                                     "prompts are token ids; text stays empty")(
      "chat-prompts", "the prompts of chat lines, rendered", cxxopts::value<std::string>())(
      "h,help", "this text");
}

// `open`: requests come while the run goes on, so there is no file.
InputOptions input_of(const cxxopts::ParseResult& given, bool open = false) {
  InputOptions input;
  input.model = required_argument(given, "model");
  if (!open) {
    input.input = required_argument(given, "input-file");
  }
  if (given.count("max-model-len") != 0) {
    input.max_model_len = static_cast<std::int32_t>(number(given, "max-model-len", 1, kMaxOf));
  }
  take_number(given, "seed", 0, UINT64_MAX, input.seed);
  if (given.count("served-model-name") != 0) {
    input.served_model_name = required_argument(given, "served-model-name");
  }
  input.skip_tokenizer_init = given.count("skip-tokenizer-init") != 0;
  if (given.count("chat-prompts") != 0) {
    input.chat_prompts = required_argument(given, "chat-prompts");
  }
  return input;
}

void take_kv_format(const cxxopts::ParseResult& given, KvFormat& into) {
  if (given.count("kv-cache-dtype") != 0) {
    const std::string name = required_argument(given, "kv-cache-dtype");
    const auto format = kv_format_from(name);
    if (!format) {
      fail("--kv-cache-dtype {}: one of auto, int8 and int4 is wanted", name);
    }
    into = *format;
  }
}

// How much is worked on at a time, in a run or a plan.
void take_batch(const cxxopts::ParseResult& given, BatchOptions& batch) {
  take_number(given, "max-num-seqs", 1, kMaxOf, batch.max_num_seqs);
  take_number(given, "min-num-seqs", 1, kMaxOf, batch.min_num_seqs);
  if (batch.min_num_seqs > batch.max_num_seqs) {
    fail("--min-num-seqs {} is more than --max-num-seqs, which is {}{}", batch.min_num_seqs,
         batch.max_num_seqs, given.count("max-num-seqs") == 0 ? " where it is not given" : "");
  }
  take_number(given, "mini-batch-tokens", kBlockTokens, kMaxOf, batch.mini_batch_tokens);
  batch.by_profile = given.count("mini-batch-tokens") == 0;
  take_number(given, "prefill-tokens", 1, kMaxOf, batch.prefill_tokens);
  if (given.count("prompt-rows") != 0 && given["prompt-rows"].as<std::string>() != "auto") {
    batch.prompt_rows = static_cast<std::int32_t>(number(given, "prompt-rows", 1, kMaxOf));
  }
  take_kv_format(given, batch.kv_format);
  if (given.count("host-attention") != 0) {
    const std::string host = required_argument(given, "host-attention");
    if (host != "auto" && host != "off") {
      fail("--host-attention {}: one of auto and off is wanted", host);
    }
    batch.host_attention = host == "auto";
  }
  if (given.count("absorption") != 0) {
    const std::string absorption = required_argument(given, "absorption");
    if (absorption != "on" && absorption != "off") {
      fail("--absorption {}: one of off and on is wanted", absorption);
    }
    batch.absorption = absorption == "on";
  }
  if (given.count("prefix-sharing") != 0) {
    const std::string sharing = required_argument(given, "prefix-sharing");
    if (sharing != "on" && sharing != "off") {
      fail("--prefix-sharing {}: one of on and off is wanted", sharing);
    }
    batch.share_prefixes = sharing == "on";
  }
}

void refuse_host_attention(const std::optional<std::string>& policy, const BatchOptions& batch) {
  if (policy && !batch.host_attention && policy_named(*policy).attends_on_host) {
    fail_for_host_attention_off("the policy " + *policy);
  }
}

void add_placing(cxxopts::Options& options) {
  const auto text = [] { return cxxopts::value<std::string>(); };
  options.add_options()("schedule", "column-by-column, or row-by-row: one mini-batch", text())(
      "resident-layers", "whose weights stay on the device", text())(
      "percent", "FlexGen's: weights, context, activations, each on device and host", text())(
      "gpu-blocks", "kinds of context that the device may keep: all, act or none", text())(
      "host-attention", "auto: as the policy says; off: host cores attend nothing", text())(
      "absorption", "on: rows of answers attend activations as they are; off: never", text());
}

// How the policy schedules, and where everything lies, of a run or a plan.
template <typename Options>
void take_placing(const cxxopts::ParseResult& given, Options& into) {
  if (given.count("schedule") != 0) {
    const std::string schedule = required_argument(given, "schedule");
    if (schedule != "row-by-row" && schedule != "column-by-column") {
      fail("--schedule {}: one of column-by-column and row-by-row is wanted", schedule);
    }
    into.policy_options.row_by_row = schedule == "row-by-row";
  }
  if (given.count("resident-layers") != 0) {
    into.placement.resident_layers =
        static_cast<std::int32_t>(number(given, "resident-layers", 0, kMaxOf));
  }
  if (given.count("percent") != 0) {
    into.placement.percent = parse_percent(required_argument(given, "percent"));
  }
  if (given.count("gpu-blocks") != 0) {
    into.placement.gpu_blocks = parse_gpu_blocks(required_argument(given, "gpu-blocks"));
  }
  into.placement.check_alone();
}

// What everything costs, of a run or a plan.
template <typename Options>
void take_costs(const cxxopts::ParseResult& given, Options& into) {
  if (given.count("machine") != 0) {
    into.machine = required_argument(given, "machine");
    find_machine(*into.machine);  // refuses what there is not
  }
  if (given.count("profile") != 0) {
    into.profile = required_argument(given, "profile");
    if (into.machine) {
      fail("--profile and --machine: only one of them can say what everything costs");
    }
  }
  if (given.count("profile-dir") != 0) {
    into.profile_dir = required_argument(given, "profile-dir");
  }
}

void take_orders_log(const cxxopts::ParseResult& given, RunOptions& into) {
  if (given.count("orders-log") != 0) {
    const std::string name = required_argument(given, "orders-log");
    const auto keeps = log_keeps_from(name);
    if (!keeps) {
      fail("--orders-log {}: one of off, tables and full is wanted", name);
    }
    into.orders_log.keeps = *keeps;
  }
  take_bytes(given, "orders-log-size", into.orders_log.size);
  if (into.orders_log.size && *into.orders_log.size < kMinLogSize) {
    fail("--orders-log-size {}: at least {} is wanted", into.orders_log.size->n,
         size_text(kMinLogSize));
  }
  if (into.trace && into.orders_log.keeps != LogKeeps::full) {
    fail("--trace is made of the reports that --orders-log {} leaves out: use --orders-log full",
         name_of(into.orders_log.keeps));
  }
}

// What a run without files cannot have.
void refuse_files(const cxxopts::ParseResult& given) {
  for (const char* name : {"input-file", "output-file", "chat-prompts", "resume", "overwrite",
                           "verify", "trace"}) {
    if (given.count(name) != 0) {
      fail("--{} is for requests in a file: leave it or --front-socket out", name);
    }
  }
}

void add_run(cxxopts::Options& options) {
  const auto text = [] { return cxxopts::value<std::string>(); };
  options.add_options()("o,output-file", "results", text())(
      "front-socket", "to connect to: requests and answers pass over it, and there is no file",
      text())("run-dir", "state of the run", text())(
      "run-id", "of the control segment, hex", text())("loader-socket", "to connect to", text())(
      "executor-socket", "to bind", text())("policy", "one of `poise-planner policies`", text())(
      "act-share", "share of ACT blocks, for hybrid and kvpr", text())(
      "recompute-share", "share of context kept as token ids, for token-recompute", text())(
      "machine", "whose costs the policy decides by: h200-pcie5, …, or a file", text())(
      "profile", "costs that were measured: a file", text())(
      "profile-dir", "measured costs are kept there", text())(
      "max-num-seqs", "requests under way at a time", text())(
      "min-num-seqs", "where the policy may choose fewer", text())(
      "mini-batch-tokens", "context of a mini-batch", text())(
      "prefill-tokens", "rows of prompts in an iteration", text())(
      "prompt-rows", "of them beside requests that generate: auto, by costs, or a number", text())(
      "prefix-sharing", "on or off: prompts that begin alike are computed once", text())(
      "kv-cache-dtype", "of KV blocks: auto (the model's), int8 or int4", text())(
      "gpu-memory", "cap, bytes", text())("host-memory", "cap, bytes", text())(
      "resume", "go on with the run directory")("overwrite", "replace an existing output")(
      "verify", "let the loader check the weights in shared memory")(
      "takes-over",
      "continue the work of this run's earlier planner, with its loader and gpu_executor")(
      "trace", "log what each stream did, span by span")(
      "orders-log", "what it keeps: off, tables or full", text())(
      "orders-log-size", "limit, bytes: the oldest orders are removed", text())(
      "log", "file", text())("death-fd", "pipe that the supervisor holds", text())(
      "grammar-python", "a Python that has llguidance", text())(
      "grammar-script", "what it runs (grammar_worker.py)", text());
}

// Where its files and the other processes are.
void take_places(const cxxopts::ParseResult& given, RunOptions& run) {
  if (given.count("front-socket") != 0) {
    run.front_socket = required_argument(given, "front-socket");
    refuse_files(given);
  } else {
    run.output = required_argument(given, "output-file");
  }
  run.run_dir = required_argument(given, "run-dir");
  run.run_id = required_argument(given, "run-id");
  run.loader_socket = required_argument(given, "loader-socket");
  run.executor_socket = required_argument(given, "executor-socket");
  if (given.count("log") != 0) {
    run.log = required_argument(given, "log");
  }
  if (given.count("grammar-python") != 0) {
    run.grammar_python = required_argument(given, "grammar-python");
    run.grammar_script = required_argument(given, "grammar-script");
  }
}

void take_policy(const cxxopts::ParseResult& given, RunOptions& run) {
  if (given.count("policy") != 0) {
    run.policy = required_argument(given, "policy");
  }
  if (given.count("act-share") != 0) {
    run.policy_options.act_share = share(given, "act-share");
  }
  if (given.count("recompute-share") != 0) {
    run.policy_options.recompute_share = share(given, "recompute-share");
  }
}

PlannerCommand run_command(const std::vector<std::string>& words) {
  cxxopts::Options options(
      "poise-planner",
      "Decides which request runs when and where its context lies.\n"
      "Also: poise-planner policies | simulate NAME | inspect LOG | replay | validate | encode");
  add_input(options);
  add_run(options);
  add_placing(options);
  const auto given = parse_arguments(options, words);
  if (given.count("help") != 0) {
    return HelpOptions{options.help()};
  }
  RunOptions run;
  run.input = input_of(given, given.count("front-socket") != 0);
  take_places(given, run);
  take_policy(given, run);
  take_costs(given, run);
  take_placing(given, run);
  if (run.policy || run.policy_options.act_share || run.policy_options.recompute_share ||
      run.policy_options.row_by_row) {
    make_policy(run.policy.value_or("hybrid"), run.policy_options);  // refuses what cannot be
  }
  take_batch(given, run.batch);
  refuse_host_attention(run.policy, run.batch);
  take_bytes(given, "gpu-memory", run.gpu_memory);
  take_bytes(given, "host-memory", run.host_memory);
  run.served_model_name =
      run.input.served_model_name.empty() ? run.input.model.string() : run.input.served_model_name;
  run.resume = given.count("resume") != 0;
  run.overwrite = given.count("overwrite") != 0;
  run.verify = given.count("verify") != 0;
  run.takes_over = given.count("takes-over") != 0;
  run.trace = given.count("trace") != 0;
  take_orders_log(given, run);
  take_number(given, "death-fd", 0, 1 << 20, run.death_descriptor);
  return run;
}

void take_dtype(const cxxopts::ParseResult& given, PlanOptions& into) {
  if (given.count("dtype") != 0 && given["dtype"].as<std::string>() != "auto") {
    into.dtype = dtype_from(required_argument(given, "dtype"));
    if (!into.dtype) {
      fail("--dtype {}: there is no such type", given["dtype"].as<std::string>());
    }
  }
}

void take_packing(const cxxopts::ParseResult& given, PlanOptions& into) {
  if (given.count("quantization") != 0) {
    const auto quantization = quantization_from(required_argument(given, "quantization"));
    if (!quantization) {
      fail("--quantization {}: one of auto, none, int8 and int4 is wanted",
           given["quantization"].as<std::string>());
    }
    into.quantization = *quantization;
  }
  if (given.count("pack-weights") != 0) {
    const auto pack = pack_weights_from(required_argument(given, "pack-weights"));
    if (!pack) {
      fail("--pack-weights {}: one of auto and off is wanted",
           given["pack-weights"].as<std::string>());
    }
    into.pack_weights = *pack;
  }
}

void take_device(const cxxopts::ParseResult& given, PlanOptions& into) {
  if (given.count("device") != 0) {
    const std::string device = required_argument(given, "device");
    into.device = device_kind_from(device);
    if (!into.device && device != "auto") {
      fail("--device {}: one of auto, cpu and cuda is wanted", device);
    }
  }
}

PlannerCommand plan_command(const std::vector<std::string>& words) {
  cxxopts::Options options("poise-planner plan", "What a run would do, as JSON.");
  add_input(options);
  const auto text = [] { return cxxopts::value<std::string>(); };
  options.add_options()("dtype", "of weights and context", text())(
      "quantization", "of weights: auto, none, int8, int4", text())(
      "pack-weights", "of bfloat16: auto, off", text())("policy", "name", text())(
      "act-share", "share of ACT blocks", text())("recompute-share",
                                                  "share of context as ids alone", text())(
      "machine", "use this machine's costs: a name or a file", text())(
      "profile", "costs that were measured", text())("profile-dir", "where such are kept", text())(
      "max-num-seqs", "requests at a time", text())("min-num-seqs",
                                                    "where the policy may choose fewer",
                                                    text())("mini-batch-tokens", "context", text())(
      "prefill-tokens", "rows of prompts in an iteration", text())(
      "prompt-rows", "of them beside requests that generate: auto, by costs, or a number", text())(
      "prefix-sharing", "on or off; the plan counts every prompt as computed", text())(
      "kv-cache-dtype", "of KV blocks: auto, int8 or int4", text())(
      "gpu-memory", "cap, bytes", text())("host-memory", "cap, bytes", text())(
      "device", "use costs kept for: cpu, cuda, or auto (the newest)", text())(
      "check", "only check that policy and costs exist")(
      "time", "how long it takes to plan N iterations, instead of the plan", text());
  add_placing(options);
  const auto given = parse_arguments(options, words);
  if (given.count("help") != 0) {
    return HelpOptions{options.help()};
  }
  PlanOptions plan;
  plan.input = input_of(given);
  take_dtype(given, plan);
  take_packing(given, plan);
  if (given.count("policy") != 0) {
    plan.policy = required_argument(given, "policy");
  }
  if (given.count("act-share") != 0) {
    plan.policy_options.act_share = share(given, "act-share");
  }
  if (given.count("recompute-share") != 0) {
    plan.policy_options.recompute_share = share(given, "recompute-share");
  }
  take_costs(given, plan);
  take_placing(given, plan);
  make_policy(plan.policy.value_or("hybrid"), plan.policy_options);  // refuses what cannot be
  take_batch(given, plan.batch);
  refuse_host_attention(plan.policy, plan.batch);
  take_bytes(given, "gpu-memory", plan.gpu_memory);
  take_bytes(given, "host-memory", plan.host_memory);
  take_device(given, plan);
  plan.check_only = given.count("check") != 0;
  take_number(given, "time", 1, kMaxOf, plan.timed);
  return plan;
}

PlannerCommand profile_command(const std::vector<std::string>& words) {
  cxxopts::Options options("poise-planner profile", "Measures what everything costs here.");
  const auto text = [] { return cxxopts::value<std::string>(); };
  options.add_options()("run-dir", "state of the run", text())(
      "run-id", "of the control segment", text())("loader-socket", "to connect to", text())(
      "executor-socket", "to bind", text())("profile-dir", "keeps profiles by their fingerprint",
                                            text())("o,output-file", "the profile", text())(
      "kv-cache-dtype", "of KV blocks: auto, int8 or int4", text())(
      "gpu-memory", "cap, bytes", text())("host-memory", "cap, bytes", text())(
      "log", "file", text())("death-fd", "pipe that the supervisor holds", text())("h,help",
                                                                                   "this text");
  const auto given = parse_arguments(options, words);
  if (given.count("help") != 0) {
    return HelpOptions{options.help()};
  }
  ProfileOptions profile;
  profile.run_dir = required_argument(given, "run-dir");
  profile.run_id = required_argument(given, "run-id");
  profile.loader_socket = required_argument(given, "loader-socket");
  profile.executor_socket = required_argument(given, "executor-socket");
  profile.output = required_argument(given, "output-file");
  take_bytes(given, "gpu-memory", profile.gpu_memory);
  take_bytes(given, "host-memory", profile.host_memory);
  take_kv_format(given, profile.kv_format);
  if (given.count("log") != 0) {
    profile.log = required_argument(given, "log");
  }
  take_number(given, "death-fd", 0, 1 << 20, profile.death_descriptor);
  return profile;
}

// Which kept profile, as of a plan; where the machine is written.
PlannerCommand export_command(const std::vector<std::string>& words) {
  cxxopts::Options options("poise-planner export",
                           "Writes the machine of a kept profile as a file for --machine.");
  const auto text = [] { return cxxopts::value<std::string>(); };
  options.add_options()("model", "a HuggingFace model directory", text())(
      "dtype", "of weights and context", text())("device", "auto, cpu or cuda", text())(
      "quantization", "of weights: auto, none, int8, int4", text())(
      "pack-weights", "of bfloat16: auto, off", text())("kv-cache-dtype",
                                                        "of KV blocks: auto, int8 or int4", text())(
      "profile", "this file instead of a kept one", text())(
      "profile-dir", "where such are kept", text())("o,output-file", "the machine", text())(
      "h,help", "this text");
  const auto given = parse_arguments(options, words);
  if (given.count("help") != 0) {
    return HelpOptions{options.help()};
  }
  ExportOptions exported;
  exported.costs.input.model = required_argument(given, "model");
  exported.output = required_argument(given, "output-file");
  take_dtype(given, exported.costs);
  take_device(given, exported.costs);
  take_packing(given, exported.costs);
  take_kv_format(given, exported.costs.batch.kv_format);
  if (given.count("profile") != 0) {
    exported.costs.profile = required_argument(given, "profile");
  }
  if (given.count("profile-dir") != 0) {
    exported.costs.profile_dir = required_argument(given, "profile-dir");
  }
  return exported;
}

PlannerCommand replay_command(const std::vector<std::string>& words) {
  cxxopts::Options options("poise-planner replay", "Gives a log's orders to an executor again.");
  const auto text = [] { return cxxopts::value<std::string>(); };
  options.add_options()("orders", "the log", text())("run-dir", "state of the replay", text())(
      "run-id", "of the control segment", text())("loader-socket", "to connect to", text())(
      "executor-socket", "to bind", text())("o,output-file", "the report", text())(
      "replayed", "a log of the replay", text())("until", "the last iteration", text())(
      "repeat", "how often", text())("host-memory", "cap, bytes", text())("log", "file", text())(
      "death-fd", "pipe that the supervisor holds", text())("h,help", "this text");
  const auto given = parse_arguments(options, words);
  if (given.count("help") != 0) {
    return HelpOptions{options.help()};
  }
  ReplayOptions replay;
  replay.orders = required_argument(given, "orders");
  replay.run_dir = required_argument(given, "run-dir");
  replay.run_id = required_argument(given, "run-id");
  replay.loader_socket = required_argument(given, "loader-socket");
  replay.executor_socket = required_argument(given, "executor-socket");
  replay.output = required_argument(given, "output-file");
  if (given.count("replayed") != 0) {
    replay.replayed = required_argument(given, "replayed");
  }
  if (given.count("until") != 0) {
    replay.until = number(given, "until", 1, UINT64_MAX);
  }
  take_number(given, "repeat", 1, kMaxOf, replay.repeat);
  take_bytes(given, "host-memory", replay.host_memory);
  if (given.count("log") != 0) {
    replay.log = required_argument(given, "log");
  }
  take_number(given, "death-fd", 0, 1 << 20, replay.death_descriptor);
  return replay;
}

LogDiffOptions diff_of(const cxxopts::ParseResult& given) {
  for (const char* name : {"check", "iteration", "layer"}) {
    if (given.count(name) != 0) {
      fail("--diff finds the first difference by itself: leave --{} out", name);
    }
  }
  return {.a = required_argument(given, "log"),
          .b = required_argument(given, "other"),
          .compared = given.count("times") != 0 ? Compared::everything : Compared::work,
          .json = given.count("json") != 0};
}

PlannerCommand inspect_command(const std::vector<std::string>& words) {
  cxxopts::Options options("poise-planner inspect", "Shows a log of orders.");
  options.add_options()("log", "the log", cxxopts::value<std::string>())(
      "json", "one JSON object a line")(
      "brief", "with --json: sums of each iteration and times of each request, no orders")(
      "check", "whether every order could be right; ends with 1 if not")(
      "iteration", "this one alone", cxxopts::value<std::string>())(
      "layer", "this one alone, from 0", cxxopts::value<std::string>())(
      "diff", "the first difference of two logs; ends with 1 if there is one")(
      "other", "the second log, for --diff", cxxopts::value<std::string>())(
      "times", "with --diff: clocks, names and measured times, too")("h,help", "this text");
  options.parse_positional({"log", "other"});
  options.positional_help("LOG [LOG]");
  const auto given = parse_arguments(options, words);
  if (given.count("help") != 0) {
    return HelpOptions{options.help()};
  }
  if (given.count("diff") != 0) {
    return diff_of(given);
  }
  for (const char* name : {"other", "times"}) {
    if (given.count(name) != 0) {
      fail("two logs, and --times, are for --diff");
    }
  }
  InspectOptions inspect;
  inspect.log = required_argument(given, "log");
  inspect.json = given.count("json") != 0;
  inspect.brief = given.count("brief") != 0;
  inspect.check = given.count("check") != 0;
  if (inspect.brief && (!inspect.json || inspect.check || given.count("layer") != 0)) {
    fail("--brief goes with --json, and shows no layers");
  }
  if (inspect.check &&
      (inspect.json || given.count("iteration") != 0 || given.count("layer") != 0)) {
    fail(
        "--check looks at the whole log and says so in words: leave --json, --iteration and "
        "--layer out");
  }
  if (given.count("iteration") != 0) {
    inspect.iteration = number(given, "iteration", 0, UINT64_MAX);
  }
  if (given.count("layer") != 0) {
    inspect.layer = static_cast<std::uint32_t>(number(given, "layer", 0, kMaxOf));
  }
  return inspect;
}

PlannerCommand validate_command(const std::vector<std::string>& words) {
  cxxopts::Options options("poise-planner validate", "Checks every line of a file of requests.");
  add_input(options);
  const auto given = parse_arguments(options, words);
  if (given.count("help") != 0) {
    return HelpOptions{options.help()};
  }
  return ValidateOptions{input_of(given)};
}

PlannerCommand encode_command(const std::vector<std::string>& words) {
  cxxopts::Options options("poise-planner encode",
                           "Token ids of texts: JSON strings in, JSON arrays out, one a line.");
  options.add_options()("model", "a HuggingFace model directory", cxxopts::value<std::string>())(
      "h,help", "this text");
  const auto given = parse_arguments(options, words);
  if (given.count("help") != 0) {
    return HelpOptions{options.help()};
  }
  return EncodeOptions{required_argument(given, "model")};
}

PlannerCommand policies_command(const std::vector<std::string>& words) {
  cxxopts::Options options("poise-planner policies", "Lists the policies.");
  options.add_options()("json", "one JSON object a line")("h,help", "this text");
  const auto given = parse_arguments(options, words);
  if (given.count("help") != 0) {
    return HelpOptions{options.help()};
  }
  return PoliciesOptions{given.count("json") != 0};
}

PlannerCommand simulate_command(const std::vector<std::string>& words) {
  std::string names;
  for (const Simulation& simulation : simulations()) {
    names += fmt::format("\n  {:<16} {}", simulation.name, simulation.description);
  }
  cxxopts::Options options("poise-planner simulate",
                           "Plays the planner's decisions in virtual time; NAME is one of" + names);
  options.add_options()("name", "what to simulate", cxxopts::value<std::string>())(
      "machine", "play it on this machine, a name or a file, instead of the paper's",
      cxxopts::value<std::string>())("json", "one JSON object")(
      "table", "with --json: the table before it")("h,help", "this text");
  options.parse_positional({"name"});
  options.positional_help("NAME");
  const auto given = parse_arguments(options, words);
  if (given.count("help") != 0) {
    return HelpOptions{options.help()};
  }
  SimulateOptions simulate{.name = required_argument(given, "name"),
                           .machine = {},
                           .json = given.count("json") != 0,
                           .table = given.count("table") != 0};
  if (given.count("machine") != 0) {
    simulate.machine = required_argument(given, "machine");
    find_machine(*simulate.machine);  // refuses what there is not
  }
  simulation_named(simulate.name);  // refuses what there is not
  return simulate;
}

}  // namespace

PlannerCommand parse_planner_arguments(int argc, const char* const* argv) {
  std::vector<std::string> words = with_hyphens(argc, argv);
  const std::string command = words.size() > 1 ? words[1] : "";
  const std::pair<std::string_view, PlannerCommand (*)(const std::vector<std::string>&)> others[] =
      {{"inspect", inspect_command},   {"validate", validate_command}, {"encode", encode_command},
       {"policies", policies_command}, {"plan", plan_command},         {"profile", profile_command},
       {"replay", replay_command},     {"simulate", simulate_command}, {"export", export_command}};
  for (const auto& [name, parse] : others) {
    if (command == name) {
      words.erase(words.begin() + 1);
      return parse(words);
    }
  }
  return run_command(words);
}

}  // namespace poise
