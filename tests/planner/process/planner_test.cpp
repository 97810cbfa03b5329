// The planner process as one object, between its peers (fake_peers.h).

#include "planner/process/planner.h"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <fstream>
#include <map>
#include <random>

#include "common/files/json.h"
#include "common/trouble.h"
#include "common/weight_layout.h"
#include "planner/record/inspect.h"
#include "tests/planner/links/fake_peers.h"

namespace poise {
namespace {

using nlohmann::json;
using testing_support::FakeExecutor;
using testing_support::FakeLoader;
using testing_support::kCredits;
using testing_support::kModelContext;
using testing_support::new_run_id;
using testing_support::SealedModel;
using testing_support::test_shape;

struct InputLine {
  std::vector<TokenId> prompt;
  int max_tokens;
  std::uint64_t seed;
  bool echo;               // with logprobs
  std::size_t score_from;  // 0: nothing is scored
};

std::vector<TokenId> predicted(const InputLine& line) {
  std::vector<TokenId> text = line.prompt, answer;
  for (int step = 0; step < line.max_tokens; ++step) {
    answer.push_back(symbolic_token(text, line.seed ^ static_cast<std::uint64_t>(step)));
    text.push_back(answer.back());
  }
  return answer;
}

// What an attempt does otherwise than all others.
struct Change {
  std::function<void(RunOptions&)> options = [](RunOptions&) {};
  std::function<void(FakeLoader&, FakeExecutor&)> peers = [](FakeLoader&, FakeExecutor&) {};
};

class PlannerProcess : public testing::Test {
 protected:
  PlannerProcess() {
    std::filesystem::create_directory(at("model"));
    std::filesystem::create_directory(at("run"));
    testing_support::write_file(at("model") / "config.json",
                                testing_support::config_json(test_shape(), "float32"));
  }

  std::filesystem::path at(const std::string& name) const { return folder_.path() / name; }

  // Requests of all lengths, one line each; some echo their prompt with its logprobs, some of these
  // want nothing else. Of others a part of the prompt is scored.
  void write_requests(std::uint32_t seed, int count, int longest_answer = 30) {
    std::mt19937 random(seed);
    std::string text;
    for (int i = 0; i < count; ++i) {
      InputLine line{
          .prompt = std::vector<TokenId>(1 + random() % 90),
          .max_tokens = 1 + static_cast<int>(random() % static_cast<unsigned>(longest_answer)),
          .seed = random(),
          .echo = i % 5 == 0,
          .score_from = i % 10 == 8 ? 1 + random() % 40 : 0};
      line.max_tokens = i % 10 == 5 || i % 10 == 8 ? 0 : line.max_tokens;
      for (TokenId& token : line.prompt) {
        token = static_cast<TokenId>(random() % kVocabulary);
      }
      line.prompt.resize(std::max(line.prompt.size(), line.score_from + 1), 7);
      json body{{"prompt", line.prompt},   {"max_tokens", line.max_tokens},
                {"seed", line.seed},       {"temperature", 1},
                {"ignore_eos", true},      {"echo", line.echo},
                {"return_token_ids", true}};
      if (line.echo) {
        body["logprobs"] = 1;
      }
      if (line.score_from > 0) {
        body["score_from"] = line.score_from;
      }
      const std::string id = fmt::format("r{}", i);
      text += json{{"custom_id", id},
                   {"method", "POST"},
                   {"url", "/v1/completions"},
                   {"body", std::move(body)}}
                  .dump() +
              "\n";
      lines_[id] = std::move(line);
    }
    testing_support::write_file(at("in.jsonl"), text);
  }

  RunOptions options(const std::string& run_id) const {
    RunOptions run;
    run.input = {.model = at("model"),
                 .input = at("in.jsonl"),
                 .max_model_len = {},
                 .seed = 0,
                 .skip_tokenizer_init = true};
    run.output = at("out.jsonl");
    run.run_dir = at("run");
    run.run_id = run_id;
    run.loader_socket = at("loader.sock");
    run.executor_socket = at("executor.sock");
    run.served_model_name = "tiny";
    return run;
  }

  // One attempt, from start to end; throws what the planner throws.
  Exit attempt(const Change& change = {}) {
    SealedModel model(new_run_id());
    FakeLoader loader(at("loader.sock"), model.identity());
    FakeExecutor executor(at("executor.sock"), model.identity(), loader);
    RunOptions run = options(model.control().run_id());
    change.options(run);
    change.peers(loader, executor);
    loader.start();
    executor.start();
    Planner planner(run);
    while (planner.step()) {
    }
    EXPECT_TRUE(executor.iterations == 0 || executor.most_undone == kCredits);
    EXPECT_GT(model.control()->progress[static_cast<int>(Process::planner)].steps.load(), 0u);
    return planner.outcome();
  }

  std::map<std::string, json> output() const {
    std::map<std::string, json> by_id;
    std::ifstream file(at("out.jsonl"));
    for (std::string line; std::getline(file, line);) {
      json value = json::parse(line);
      const std::string id = value["custom_id"].is_null() ? "" : value["custom_id"];
      EXPECT_TRUE(by_id.emplace(id, value).second) << "two lines for " << id;
    }
    return by_id;
  }

  void expect_predicted(const std::map<std::string, json>& results) const {
    for (const auto& [id, line] : lines_) {
      const auto found = results.find(id);
      ASSERT_NE(found, results.end()) << id;
      EXPECT_EQ(found->second["response"]["status_code"], 200) << found->second.dump();
      const json& choice = found->second["response"]["body"]["choices"][0];
      EXPECT_EQ(choice["token_ids"].get<std::vector<TokenId>>(), predicted(line)) << id;
      if (line.echo) {
        json values = json::array({nullptr});
        for (std::size_t position = 0; position + 1 < line.prompt.size(); ++position) {
          values.push_back(-static_cast<double>(position));
        }
        values.insert(values.end(), static_cast<std::size_t>(line.max_tokens), -0.5);
        EXPECT_EQ(choice["logprobs"]["token_logprobs"], values) << id;
      }
      if (line.score_from > 0) {
        json values = json::array();
        for (std::size_t place = line.score_from; place < line.prompt.size(); ++place) {
          values.push_back(-static_cast<double>(place - 1));
        }
        EXPECT_EQ(choice["scores"]["logprobs"], values) << id;
      }
    }
  }

  testing_support::TempDirectory folder_;
  std::map<std::string, InputLine> lines_;
};

TEST_F(PlannerProcess, AnswersEveryLineUnderEachPolicy) {
  write_requests(1, 40);
  for (const char* policy : {"kv-only", "act-only", "hybrid"}) {
    SCOPED_TRACE(policy);
    std::filesystem::remove_all(at("run"));
    std::filesystem::create_directory(at("run"));
    EXPECT_EQ(attempt({.options =
                           [&](RunOptions& run) {
                             run.policy = policy;
                             run.overwrite = true;
                             run.batch.max_num_seqs = 12;
                             run.batch.mini_batch_tokens = 320;
                             run.batch.prefill_tokens = 70;
                           }}),
              Exit::done);
    const auto results = output();
    EXPECT_EQ(results.size(), lines_.size());
    expect_predicted(results);
    const json status = json::parse(testing_support::read_file(at("run") / "status.json"));
    EXPECT_EQ(status["state"], "done");
    EXPECT_EQ(status["done"], 40);
    EXPECT_EQ(status["requests"], 40);
    EXPECT_GT(status["link_bytes"]["stores"], 0);
  }
}

// A pass that ends sound says nothing of answers that came while it was under way.
TEST_F(PlannerProcess, AnswersThatCameDuringASoundPassAreTakenBackIfTheNextOneFindsDamage) {
  write_requests(6, 60);
  const auto size = [&] {
    std::error_code none_yet;
    const auto bytes = std::filesystem::file_size(at("run") / "results.jsonl.partial", none_yet);
    return none_yet ? 0 : bytes;
  };
  std::optional<std::uintmax_t> at_first;  // not before it was asked for
  bool second = false;
  const auto check = [&]() -> std::optional<messages::WeightsCheckedT> {
    messages::WeightsCheckedT checked;
    if (second) {
      checked.damaged = true;
      checked.sentence = "a weight has another value";
      return checked;
    }
    if (!at_first) {
      at_first = size();
    }
    if (size() == *at_first) {
      return std::nullopt;  // until a line came
    }
    second = checked.sound = true;
    return checked;
  };
  try {
    attempt({.options =
                 [](RunOptions& run) {
                   run.verify = true;
                   run.batch.max_num_seqs = 4;
                 },
             .peers = [&](FakeLoader& loader, FakeExecutor&) { loader.check = check; }});
    ADD_FAILURE() << "damage was not noticed";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::interrupted);
    EXPECT_THAT(failure.what(), testing::HasSubstr("taken back"));
  }
  EXPECT_TRUE(second);
  EXPECT_LE(size(), at_first.value());
}

TEST_F(PlannerProcess, WhereOneChoiceFailsTheOthersOfItsLineComputeNoFurther) {
  testing_support::write_file(
      at("in.jsonl"),
      R"({"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":[5,6],"n":3,"temperature":1,"max_tokens":200,"ignore_eos":true}})"
      "\n");
  for (const std::uint32_t broken : {0U, 1U, kFirstFurtherChoice, kFirstFurtherChoice + 1}) {
    SCOPED_TRACE(broken);
    std::filesystem::remove_all(at("run"));
    std::filesystem::create_directory(at("run"));
    int iterations = 0;
    {
      SealedModel model(new_run_id());
      FakeLoader loader(at("loader.sock"), model.identity());
      FakeExecutor executor(at("executor.sock"), model.identity(), loader);
      executor.breaks_request = broken;
      executor.breaks_all = broken == 0;
      loader.start();
      executor.start();
      RunOptions run = options(model.control().run_id());
      run.overwrite = true;
      Planner planner(run);
      while (planner.step()) {
      }
      EXPECT_EQ(planner.outcome(), Exit::done);
      iterations = executor.iterations;
    }
    EXPECT_EQ(output().at("a")["response"]["status_code"], 500);
    EXPECT_LE(iterations, 2);
  }
}

TEST_F(PlannerProcess, ASmallPoolChangesNoAnswer) {
  write_requests(10, 30, 150);
  const Bytes weights = weight_layout(test_shape(), DType::float32).total();
  const Bytes block =
      block_sizes(test_shape(), DType::float32, KvFormat::plain).block(BlockKind::kv);
  EXPECT_EQ(attempt({.options =
                         [&](RunOptions& run) {
                           run.policy = "hybrid";
                           run.host_memory = weights + block * test_shape().num_hidden_layers * 18;
                           run.batch.prefill_tokens = 40;
                         }}),
            Exit::done);
  expect_predicted(output());
  const json status = json::parse(testing_support::read_file(at("run") / "status.json"));
  EXPECT_GT(status["preemptions"], 0);
}

// On a device with room for the keys and values of some requests, behind a link that takes 10 ms a
// block, as making them again would. Neither fewer rows of prompts nor the memory of a third side makes them fewer.
TEST_F(PlannerProcess, OptimalHasFewRequestsUnderWayWhereTheLinkIsSlow) {
  write_requests(3, 120, 2);  // nearly all of the context is there from the beginning
  Profile profile = profile_of(machine_named("h200-pcie5"), test_shape(), DType::float32);
  profile.load_kv.b = profile.load_act.b = profile.kv_gen.b = 0.01;
  write_profile(at("costs.json"), profile);
  const auto most_under_way = [&](const char* policy) {
    std::filesystem::remove_all(at("run"));
    std::filesystem::create_directory(at("run"));
    int most = 0;
    const Exit ended = attempt({.options =
                                    [&](RunOptions& run) {
                                      run.policy = policy;
                                      run.profile = at("costs.json");
                                      run.gpu_memory = kMiB * 10;
                                      run.batch.prompt_rows = run.batch.prefill_tokens;
                                      run.batch.sides = kFewestSides;
                                      run.overwrite = true;
                                    },
                                .peers =
                                    [&](FakeLoader&, FakeExecutor& executor) {
                                      executor.device = "cuda: of symbols";
                                      executor.device_kind = messages::DeviceKind::Cuda;
                                      executor.told_most = &most;
                                    }});
    EXPECT_EQ(ended, Exit::done);
    expect_predicted(output());
    return most;
  };
  const int optimal = most_under_way("optimal"), kv_only = most_under_way("kv-only");
  EXPECT_GT(optimal, 3);
  EXPECT_LT(4 * optimal, 3 * kv_only);
}

// A policy that is named and decides without costs is not measured for, but the user learns what that would bring.
TEST_F(PlannerProcess, OnAGpuWithoutAProfileANamedPolicySaysWhatMeasuringBrings) {
  write_requests(4, 2);
  const auto said = [&](messages::DeviceKind kind) {
    std::filesystem::remove_all(at("run"));
    std::filesystem::create_directory(at("run"));
    testing::internal::CaptureStdout();
    EXPECT_EQ(attempt({.options =
                           [&](RunOptions& run) {
                             run.policy = "act-only";
                             run.profile_dir = at("profiles");
                             run.overwrite = true;
                           },
                       .peers =
                           [&](FakeLoader&, FakeExecutor& executor) {
                             executor.device = "of symbols";
                             executor.device_kind = kind;
                           }}),
              Exit::done);
    return testing::internal::GetCapturedStdout();
  };
  EXPECT_THAT(
      said(messages::DeviceKind::Cuda),
      testing::HasSubstr("policy act-only: what everything costs on of symbols is not known"));
  EXPECT_THAT(said(messages::DeviceKind::Cpu), testing::Not(testing::HasSubstr("is not known")));
}

TEST_F(PlannerProcess, ABadLineIsAnErrorLineAndTheOthersGoOn) {
  write_requests(2, 6);
  std::ofstream(at("in.jsonl"), std::ios::app)
      << "this is no JSON\n"
      << R"({"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {}})"
      << "\n";
  EXPECT_EQ(attempt(), Exit::done);
  const auto results = output();
  EXPECT_EQ(results.size(), 8u);
  expect_predicted(results);
  EXPECT_EQ(results.at("bad")["response"]["status_code"], 400);
  EXPECT_EQ(results.at("")["response"]["status_code"], 400);
}

TEST_F(PlannerProcess, OnlyBadLinesNeedNoExecutor) {
  testing_support::write_file(at("in.jsonl"), "nothing here is a request\n");
  EXPECT_EQ(attempt({.peers = [](FakeLoader& loader, FakeExecutor&) { loader.refuses = true; }}),
            Exit::done);
  EXPECT_EQ(output().size(), 1u);
}

TEST_F(PlannerProcess, EmptyInputGivesEmptyOutput) {
  testing_support::write_file(at("in.jsonl"), "\n\n");
  EXPECT_EQ(attempt(), Exit::done);
  EXPECT_EQ(testing_support::read_file(at("out.jsonl")), "");
}

TEST_F(PlannerProcess, LogitsThatAreNotFiniteEndTheirRequestAlone) {
  write_requests(3, 10);
  EXPECT_EQ(attempt({.peers =
                         [](FakeLoader&, FakeExecutor& executor) {
                           executor.breaks_request = 4;  // line 4 is r3
                         }}),
            Exit::done);
  auto results = output();
  EXPECT_NE(results.at("r3")["response"]["status_code"], 200);
  lines_.erase("r3");
  expect_predicted(results);
}

TEST_F(PlannerProcess, AValueOfAPromptThatIsNoNumberEndsItsRequestAlone) {
  write_requests(3, 12);
  for (const char* id : {"r5", "r10"}) {  // one that only wants these values, one that is answered too
    SCOPED_TRACE(id);
    std::filesystem::remove_all(at("run"));
    std::filesystem::create_directory(at("run"));
    ASSERT_GT(lines_.at(id).prompt.size(), 1u);
    EXPECT_EQ(attempt({.options = [](RunOptions& run) { run.overwrite = true; },
                       .peers =
                           [&](FakeLoader&, FakeExecutor& executor) {
                             executor.breaks_prompt =
                                 static_cast<std::uint32_t>(std::stoul(id + 1) + 1);
                           }}),
              Exit::done);
    const auto results = output();
    EXPECT_NE(results.at(id)["response"]["status_code"], 200);
    const InputLine line = lines_.extract(id).mapped();
    expect_predicted(results);
    lines_.emplace(id, line);
  }
}

TEST_F(PlannerProcess, ARequestThatKillsItsExecutorGetsAnErrorLineAndTheOthersGoOn) {
  write_requests(21, 40);
  // In its prompt, in its answer, and a request that is alone at last.
  for (const auto& [id, from] : std::map<std::string, std::uint32_t>{
           {"r6", 0},
           {"r16", static_cast<std::uint32_t>(lines_.at("r16").prompt.size())},
           {"r39", static_cast<std::uint32_t>(lines_.at("r39").prompt.size())}}) {
    SCOPED_TRACE(id);
    std::filesystem::remove_all(at("run"));
    std::filesystem::create_directory(at("run"));
    SealedModel model(new_run_id());
    FakeLoader loader(at("loader.sock"), model.identity());
    FakeExecutor executor(at("executor.sock"), model.identity(), loader);
    executor.dies_of = static_cast<std::uint32_t>(std::stoul(id.substr(1)) + 1);
    executor.dies_from = from;
    RunOptions run = options(model.control().run_id());
    run.policy = "hybrid";
    run.overwrite = true;
    run.batch.prefill_tokens = 2000;
    run.death_descriptor = 0;  // as under a supervisor, which replaces executors
    loader.start();
    executor.start();
    Planner planner(run);
    while (planner.step()) {
    }
    EXPECT_EQ(planner.outcome(), Exit::done);
    auto results = output();
    EXPECT_EQ(results.size(), lines_.size());
    const json response = results.at(id)["response"];
    EXPECT_EQ(response["status_code"], 500);
    EXPECT_EQ(response["body"]["error"]["code"], "worker_crash");
    EXPECT_GE(executor.deaths, 2);
    EXPECT_LE(executor.deaths, 2 + 6) << "40 requests are halved six times";
    const InputLine culprit = lines_.at(id);
    lines_.erase(id);
    expect_predicted(results);
    lines_.emplace(id, culprit);
    const json status = json::parse(testing_support::read_file(at("run") / "status.json"));
    EXPECT_EQ(status["errors"], 1);
    EXPECT_EQ(status["suspects"], 0);
  }
}

TEST_F(PlannerProcess, ARequestThatKillsItsExecutorAndIsTheOnlyOneEndsTheRun) {
  write_requests(22, 1);
  SealedModel model(new_run_id());
  FakeLoader loader(at("loader.sock"), model.identity());
  FakeExecutor executor(at("executor.sock"), model.identity(), loader);
  executor.dies_of = 1;
  RunOptions run = options(model.control().run_id());
  run.death_descriptor = 0;
  loader.start();
  executor.start();
  Planner planner(run);
  while (planner.step()) {
  }
  EXPECT_EQ(planner.outcome(), Exit::done);
  EXPECT_EQ(executor.deaths, 2);
  EXPECT_EQ(output().at("r0")["response"]["body"]["error"]["code"], "worker_crash");
}

TEST_F(PlannerProcess, WhatWasDoneBeforeAnEndIsNotDoneAgain) {
  write_requests(4, 40);
  const auto small = [](RunOptions& run) {
    run.batch.max_num_seqs = 5;
    run.policy = "hybrid";
  };
  try {
    attempt({.options = small,
             .peers = [](FakeLoader&, FakeExecutor& e) { e.refuses_iteration = 60; }});
    FAIL() << "a refused order was ignored";
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("it is not to be run"), std::string::npos);
  }
  EXPECT_FALSE(std::filesystem::exists(at("out.jsonl")));
  std::ifstream partial(at("run") / "results.jsonl.partial");
  const auto done = std::count(std::istreambuf_iterator<char>(partial), {}, '\n');
  EXPECT_GT(done, 5);
  EXPECT_LT(done, 40);

  EXPECT_THROW(attempt({.options = small}), Failure) << "it begins anew without --resume";
  EXPECT_EQ(attempt({.options =
                         [&](RunOptions& run) {
                           small(run);
                           run.resume = true;
                         }}),
            Exit::done);
  const auto results = output();
  EXPECT_EQ(results.size(), lines_.size());
  expect_predicted(results);
  const json status = json::parse(testing_support::read_file(at("run") / "status.json"));
  EXPECT_EQ(status["done"], 40);

  // A finished run that is resumed leaves its output alone.
  const std::string before = testing_support::read_file(at("out.jsonl"));
  EXPECT_EQ(attempt({.options =
                         [&](RunOptions& run) {
                           small(run);
                           run.resume = true;
                         }}),
            Exit::done);
  EXPECT_EQ(testing_support::read_file(at("out.jsonl")), before);
}

TEST_F(PlannerProcess, AFinishedRunThatIsResumedCountsItsOutput) {
  write_requests(2, 6);
  std::ofstream(at("in.jsonl"), std::ios::app) << "this is no JSON\n";
  const auto expect_status = [&](int done, int errors) {
    const json status = json::parse(testing_support::read_file(at("run") / "status.json"));
    EXPECT_EQ(status["state"], "done");
    EXPECT_EQ(status["done"], done);
    EXPECT_EQ(status["errors"], errors);
  };
  const auto resume = [&] {
    EXPECT_EQ(attempt({.options = [](RunOptions& run) { run.resume = true; }}), Exit::done);
  };
  EXPECT_EQ(attempt({.peers = [](FakeLoader&, FakeExecutor& e) { e.breaks_request = 4; }}),
            Exit::done);
  expect_status(7, 2);
  resume();
  expect_status(7, 2);
  std::filesystem::remove(at("out.jsonl"));
  resume();
  expect_status(7, 1);  // nothing says any more what the model could not answer
}

TEST_F(PlannerProcess, AnInputThatChangedIsNotResumed) {
  write_requests(5, 20);
  EXPECT_THROW(attempt({.peers = [](FakeLoader&, FakeExecutor& e) { e.refuses_iteration = 10; }}),
               Failure);
  write_requests(6, 20);
  try {
    attempt({.options = [](RunOptions& run) { run.resume = true; }});
    FAIL() << "it was resumed";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::foreign);
  }
}

TEST_F(PlannerProcess, APoolThatIsRefusedEndsTheRunWithTheLoadersSentence) {
  write_requests(7, 3);
  try {
    attempt({.peers = [](FakeLoader& loader, FakeExecutor&) { loader.refuses = true; }});
    FAIL() << "it ran without a pool";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::cannot_start);
    EXPECT_STREQ(failure.what(), "no room for a pool");
  }
}

// Of a kept loader, say, whose last planner was killed: the memory is this run's now.
TEST_F(PlannerProcess, APoolOfAKilledPlannerIsGivenBackBeforeAnythingIsSized) {
  write_requests(7, 3);
  SealedModel model(new_run_id());
  model.control()->pool_epoch = 4;
  model.control()->pool = {.region_bytes = 1 << 30, .act_blocks = 1, .kv_blocks = 1};
  model.control()->pool_standing = 1 << 30;
  FakeLoader loader(at("loader.sock"), model.identity());
  FakeExecutor executor(at("executor.sock"), model.identity(), loader);
  loader.start();
  executor.start();
  RunOptions run = options(model.control().run_id());
  run.host_memory = kMiB * 99;
  Planner planner(run);
  while (planner.step()) {
    EXPECT_TRUE(loader.cap == 0 || loader.releases > 0);
  }
  EXPECT_EQ(planner.outcome(), Exit::done);
  EXPECT_EQ(loader.releases, 2) << "that one and its own";
  EXPECT_EQ(loader.cap, static_cast<std::uint64_t>((kMiB * 99).n));
}

TEST_F(PlannerProcess, ARequestLargerThanHostMemoryIsRefusedWithNumbers) {
  write_requests(8, 3);
  const Bytes weights = weight_layout(test_shape(), DType::float32).total();
  EXPECT_THROW(attempt({.options = [&](RunOptions& run) { run.host_memory = weights + kKiB; }}),
               Failure);
}

TEST_F(PlannerProcess, TheLogOfItsOrdersCanBeInspected) {
  write_requests(9, 8);
  EXPECT_EQ(attempt({.options = [](RunOptions& run) { run.policy = "hybrid"; }}), Exit::done);
  struct stat status {};
  ASSERT_EQ(stat((at("run") / "orders.log").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);

  std::FILE* out = std::tmpfile();
  inspect({.log = at("run") / "orders.log", .json = true, .iteration = {}, .layer = {}}, out);
  std::rewind(out);
  std::map<std::string, int> types;
  std::uint64_t last_iteration = 0, rows = 0;
  for (char buffer[1 << 16]; std::fgets(buffer, sizeof buffer, out) != nullptr;) {
    const json line = json::parse(buffer);
    ++types[line.value("type", "header")];
    if (line.value("type", "") == "iteration") {
      EXPECT_GT(line["iteration"].get<std::uint64_t>(), last_iteration);
      last_iteration = line["iteration"];
      for (const json& batch : line["mini_batches"]) {
        rows += batch["rows"].get<std::uint64_t>();
      }
    } else if (line.value("type", "") == "layer") {
      EXPECT_TRUE(line.contains("done_s")) << "reports are in the log too";
      EXPECT_EQ(line["link_bytes"]["act"], 3);
    }
  }
  std::fclose(out);
  EXPECT_EQ(types["header"], 1);
  EXPECT_EQ(types["configure"], 1);
  EXPECT_EQ(types["ready"], 1);
  EXPECT_EQ(types["layer"], types["iteration"] * (test_shape().num_hidden_layers + 2));
  std::uint64_t wanted = 0;  // each prompt once, each token but the last of an answer
  for (const auto& [id, line] : lines_) {
    wanted += line.prompt.size() + static_cast<std::uint64_t>(std::max(line.max_tokens - 1, 0));
  }
  EXPECT_EQ(rows, wanted);

  out = std::tmpfile();
  inspect({.log = at("run") / "orders.log", .json = false, .iteration = 2, .layer = 1}, out);
  std::string text(static_cast<std::size_t>(std::ftell(out)), ' ');
  std::rewind(out);
  ASSERT_EQ(std::fread(text.data(), 1, text.size(), out), text.size());
  std::fclose(out);
  EXPECT_NE(text.find("iteration 2 at"), std::string::npos) << text;
  EXPECT_NE(text.find("layer 1 "), std::string::npos) << text;
  EXPECT_EQ(text.find("layer 0 "), std::string::npos) << text;
  EXPECT_EQ(text.find("iteration 3 at"), std::string::npos) << text;
}

}  // namespace
}  // namespace poise
