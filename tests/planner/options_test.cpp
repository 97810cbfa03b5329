#include "planner/options.h"

#include <gtest/gtest.h>

#include "common/trouble.h"

namespace poise {
namespace {

const std::vector<std::string> kRun{"--run-dir",
                                    "/r",
                                    "--run-id",
                                    "ab12",
                                    "--loader-socket",
                                    "/l",
                                    "--executor-socket",
                                    "/e",
                                    "--model",
                                    "/m",
                                    "-i",
                                    "/in",
                                    "-o",
                                    "/out"};

PlannerCommand parse(std::vector<std::string> words) {
  std::vector<const char*> argv{"poise-planner"};
  for (const std::string& word : words) {
    argv.push_back(word.c_str());
  }
  return parse_planner_arguments(static_cast<int>(argv.size()), argv.data());
}

RunOptions run(const std::vector<std::string>& more) {
  std::vector<std::string> words = kRun;
  words.insert(words.end(), more.begin(), more.end());
  return std::get<RunOptions>(parse(words));
}

std::string refusal(const std::vector<std::string>& words) {
  try {
    parse(words);
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::cannot_start);
    return failure.what();
  }
  ADD_FAILURE() << "accepted: " << testing::PrintToString(words);
  return {};
}

TEST(PlannerOptions, ARunHasDefaults) {
  const RunOptions options = run({});
  EXPECT_EQ(options.run_dir, "/r");
  EXPECT_EQ(options.input.input, "/in");
  EXPECT_EQ(options.batch.mini_batch_tokens, 8192);
  EXPECT_EQ(options.served_model_name, "/m");
  EXPECT_FALSE(options.policy || options.gpu_memory || options.host_memory || options.resume);
  EXPECT_EQ(options.death_descriptor, -1);
}

TEST(PlannerOptions, WithAFrontThereAreNoFiles) {
  std::vector<std::string> words(kRun.begin(), kRun.end() - 4);
  words.insert(words.end(), {"--front-socket", "/f"});
  const auto options = std::get<RunOptions>(parse(words));
  EXPECT_EQ(options.front_socket, "/f");
  EXPECT_TRUE(options.input.input.empty() && options.output.empty());
  for (const std::string name : {"--input-file=/in", "--output-file=/out", "--resume"}) {
    words.push_back(name);
    const std::string said = refusal(words);
    EXPECT_NE(said.find("for requests in a file"), std::string::npos) << said;
    words.pop_back();
  }
  EXPECT_TRUE(run({}).front_socket.empty());
}

TEST(PlannerOptions, AreTakenWithHyphensAndUnderscores) {
  const RunOptions options =
      run({"--host_memory=1000", "--gpu-memory", "2000", "--policy=hybrid", "--act_share", "0.25",
           "--max_num_seqs", "7", "--resume", "--overwrite", "--death-fd", "9", "--seed",
           "18446744073709551615", "--skip_tokenizer_init", "--max-model-len", "50",
           "--served_model_name", "my_model"});
  EXPECT_EQ(options.host_memory, Bytes{1000});
  EXPECT_EQ(options.gpu_memory, Bytes{2000});
  EXPECT_EQ(options.policy, "hybrid");
  EXPECT_EQ(options.policy_options.act_share, 0.25);
  EXPECT_EQ(options.batch.max_num_seqs, 7);
  EXPECT_TRUE(options.resume && options.overwrite && options.input.skip_tokenizer_init);
  EXPECT_EQ(options.death_descriptor, 9);
  EXPECT_EQ(options.input.seed, UINT64_MAX);
  EXPECT_EQ(options.input.max_model_len, 50);
  EXPECT_EQ(options.served_model_name, "my_model");
}

TEST(PlannerOptions, SayWhereWeightsAndContextAreAndInWhichOrderTheyAreUsed) {
  const RunOptions shares = run({"--percent", "25,75,0,100,100,0"});
  EXPECT_EQ(shares.placement.percent, (FlexGenPercent{25, 75, 0, 100, 100, 0}));
  const RunOptions capture = run({"--resident-layers=0", "--gpu-blocks", "act"});
  EXPECT_EQ(capture.placement.resident_layers, 0);
  EXPECT_EQ(capture.placement.gpu_blocks, GpuBlocks::act);
  EXPECT_FALSE(capture.policy_options.row_by_row);
  EXPECT_TRUE(run({"--policy", "kvpr", "--schedule", "row-by-row"}).policy_options.row_by_row);
  EXPECT_FALSE(
      run({"--policy", "hybrid", "--schedule", "column-by-column"}).policy_options.row_by_row);
}

TEST(PlannerOptions, WhatIsWrongIsNamed) {
  const struct {
    std::vector<std::string> more;
    const char* culprit;
  } cases[] = {
      {{"--max-num-seqs", "0"}, "--max-num-seqs 0"},
      {{"--max-num-seqs", "-3"}, "--max-num-seqs -3"},
      {{"--min-num-seqs", "0"}, "--min-num-seqs 0"},
      {{"--min-num-seqs", "3", "--max-num-seqs", "2"}, "3 is more than --max-num-seqs, which is 2"},
      {{"--min-num-seqs", "257"}, "which is 256 where it is not given"},
      {{"--max-num-seqs", "12x"}, "--max-num-seqs 12x"},
      {{"--max-num-seqs", "99999999999999999999999"}, "--max-num-seqs"},
      {{"--mini-batch-tokens", "15"}, "--mini-batch-tokens 15"},
      {{"--prefill-tokens", "1.5"}, "--prefill-tokens 1.5"},
      {{"--prompt-rows", "0"}, "--prompt-rows 0"},
      {{"--kv-cache-dtype", "fp8"}, "one of auto, int8 and int4"},
      {{"--absorption", "auto"}, "one of off and on"},
      {{"--gpu-memory", "0"}, "--gpu-memory 0"},
      {{"--host-memory", "18446744073709551615"}, "--host-memory"},
      {{"--seed", "18446744073709551616"}, "--seed"},
      {{"--act-share", "1.01"}, "--act-share 1.01"},
      {{"--act-share", "nan"}, "--act-share nan"},
      {{"--act-share", "0.5 "}, "--act-share"},
      {{"--machine", "abacus"}, "there are rtx4090-pcie4"},
      {{"--act-share", "0.5", "--policy", "kv-only"}, "kv-only takes no share"},
      {{"--schedule", "zig-zag"}, "one of column-by-column and row-by-row"},
      {{"--schedule", "row-by-row"}, "use --policy kvpr"},
      {{"--resident-layers", "-1"}, "--resident-layers -1"},
      {{"--percent", "20,80,0,100"}, "--percent 20,80,0,100: six numbers"},
      {{"--percent", "20,80,0,100,100,0", "--resident-layers", "3"}, "which weights"},
      {{"--percent", "20,80,0,100,100,0", "--gpu-blocks", "act"}, "which context"},
      {{"--gpu-blocks", "kv"}, "one of all, act and none"},
      {{"--policy", "best"}, "--policy best"},
      {{"--policy", ""}, "--policy is missing"},
      {{"--no-such-option"}, "no-such-option"},
      {{"stray"}, "stray"},
  };
  for (const auto& c : cases) {
    std::vector<std::string> words = kRun;
    words.insert(words.end(), c.more.begin(), c.more.end());
    EXPECT_NE(refusal(words).find(c.culprit), std::string::npos)
        << c.culprit << ": " << refusal(words);
  }
  EXPECT_NE(refusal({"--model", "/m"}).find("is missing"), std::string::npos);
  EXPECT_NE(refusal({}).find("is missing"), std::string::npos);
}

TEST(PlannerOptions, TheSmallCommandsHaveTheirOwn) {
  const auto inspect = std::get<InspectOptions>(
      parse({"inspect", "/log", "--json", "--iteration", "12", "--layer=3"}));
  EXPECT_EQ(inspect.log, "/log");
  EXPECT_TRUE(inspect.json);
  EXPECT_EQ(inspect.iteration, 12u);
  EXPECT_EQ(inspect.layer, 3u);
  EXPECT_FALSE(inspect.check);
  EXPECT_TRUE(std::get<InspectOptions>(parse({"inspect", "/log", "--check"})).check);
  EXPECT_NE(refusal({"inspect", "/log", "--check", "--json"}).find("--check"), std::string::npos);
  EXPECT_NE(refusal({"inspect"}).find("--log is missing"), std::string::npos);
  const auto validate =
      std::get<ValidateOptions>(parse({"validate", "-i", "/in", "--model", "/m"}));
  EXPECT_EQ(validate.input.input, "/in");
  EXPECT_EQ(std::get<EncodeOptions>(parse({"encode", "--model", "/m"})).model, "/m");
  EXPECT_NE(refusal({"encode"}).find("--model is missing"), std::string::npos);
  EXPECT_FALSE(std::get<PoliciesOptions>(parse({"policies"})).json);
  const auto simulate = std::get<SimulateOptions>(parse({"simulate", "capture-table3", "--json"}));
  EXPECT_EQ(simulate.name, "capture-table3");
  EXPECT_TRUE(simulate.json);
  EXPECT_FALSE(simulate.table);
  EXPECT_TRUE(
      std::get<SimulateOptions>(parse({"simulate", "capture-table3", "--json", "--table"})).table);
  EXPECT_NE(refusal({"simulate", "the-weather"}).find("capture-table3"), std::string::npos);
  EXPECT_FALSE(std::get<HelpOptions>(parse({"--help"})).text.empty());
}

}  // namespace
}  // namespace poise
