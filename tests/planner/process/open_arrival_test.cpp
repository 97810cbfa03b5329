// The planner with a front instead of a file, between its peers.

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <zmq.hpp>

#include "common/files/json.h"
#include "planner/links/clock.h"
#include "planner/process/planner.h"
#include "tests/planner/links/fake_peers.h"

namespace poise {
namespace {

using nlohmann::json;
using testing_support::FakeExecutor;
using testing_support::FakeLoader;
using testing_support::kModelContext;
using testing_support::new_run_id;
using testing_support::SealedModel;
using testing_support::test_shape;

struct Asked {
  std::vector<TokenId> prompt;
  int max_tokens;
  std::uint64_t seed;
  int choices = 1;
};

// A front that is stepped by hand.
class HandFront {
 public:
  explicit HandFront(const std::string& path, std::string id = "a front") : id_(std::move(id)) {
    socket_.set(zmq::sockopt::linger, 0);
    socket_.bind("ipc://" + path);
  }

  void submit(std::uint32_t id, const Asked& asked) {
    const json body{{"prompt", asked.prompt}, {"max_tokens", asked.max_tokens},
                    {"seed", asked.seed},     {"temperature", 1},
                    {"ignore_eos", true},     {"return_token_ids", true},
                    {"n", asked.choices}};
    const json line{{"custom_id", "c"}, {"method", "POST"}, {"url", "/v1/completions"},
                    {"body", body}};
    const json head{{"submit", {{{"id", id}, {"line", id}, {"stream", id % 2 == 0}}}}};
    send({head.dump(), line.dump()});
  }
  void cancel(std::uint32_t id) { send({json{{"cancel", {id}}}.dump()}); }

  void step() {
    zmq::message_t frame;
    while (socket_.recv(frame, zmq::recv_flags::dontwait)) {
      peer_ = frame.to_string();
      std::vector<std::string> frames;
      while (frame.more()) {
        static_cast<void>(socket_.recv(frame));
        frames.push_back(frame.to_string());
      }
      take(frames);
    }
  }

  int planners = 0;
  std::map<std::uint32_t, json> results;
  std::map<std::pair<std::uint32_t, int>, std::vector<TokenId>> streamed;  // by id and choice

 private:
  void send(const std::vector<std::string>& frames) {
    socket_.send(zmq::buffer(peer_), zmq::send_flags::sndmore);
    for (std::size_t i = 0; i < frames.size(); ++i) {
      socket_.send(zmq::buffer(frames[i]), i + 1 < frames.size() ? zmq::send_flags::sndmore
                                                                 : zmq::send_flags::none);
    }
  }

  void take(const std::vector<std::string>& frames) {
    const json message = json::parse(frames[0]);
    if (message.contains("planner") && message["planner"] != planner_) {
      planner_ = message["planner"];
      ++planners;
      send({json{{"front", id_}}.dump()});
    }
    for (const json& event : message.value("events", json::array())) {
      const std::uint32_t id = event["id"];
      if (event.contains("frame")) {
        results[id] = json::parse(frames[event["frame"]]);
      } else {
        const auto ids = event["token_ids"].get<std::vector<TokenId>>();
        std::vector<TokenId>& so_far = streamed[{id, event.value("choice", 0)}];
        EXPECT_EQ(event["first"], so_far.size());
        so_far.insert(so_far.end(), ids.begin(), ids.end());
      }
    }
  }

  zmq::context_t context_{1};
  zmq::socket_t socket_{context_, zmq::socket_type::router};
  std::string id_, peer_, planner_;
};

class OpenArrival : public testing::Test {
 protected:
  OpenArrival() {
    std::filesystem::create_directory(at("model"));
    std::filesystem::create_directory(at("run"));
    testing_support::write_file(at("model") / "config.json",
                                testing_support::config_json(test_shape(), "float32"));
    loader_.start();
    executor_.start();
  }

  std::filesystem::path at(const std::string& name) const { return folder_.path() / name; }

  RunOptions options() {
    RunOptions run;
    run.input = {.model = at("model"), .input = {}, .max_model_len = {}, .skip_tokenizer_init = true};
    run.front_socket = at("front.sock");
    run.run_dir = at("run");
    run.run_id = model_.control().run_id();
    run.loader_socket = at("loader.sock");
    run.executor_socket = at("executor.sock");
    run.served_model_name = "tiny";
    run.batch.max_num_seqs = 6;
    return run;
  }

  Asked any_request(int longest_answer = 30) {
    Asked asked{.prompt = std::vector<TokenId>(1 + random_() % 90),
                .max_tokens = 1 + static_cast<int>(random_() % static_cast<unsigned>(longest_answer)),
                .seed = random_()};
    for (TokenId& token : asked.prompt) {
      token = static_cast<TokenId>(random_() % kVocabulary);
    }
    return asked;
  }

  void ask(HandFront& front, std::uint32_t id, const Asked& asked) {
    asked_[id] = asked;
    front.submit(id, asked);
  }

  void step_until(Planner& planner, HandFront& front, const std::function<bool()>& done) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!done()) {
      ASSERT_TRUE(planner.step());
      front.step();
      ASSERT_LT(std::chrono::steady_clock::now(), end);
    }
  }

  void step_until_met(Planner& planner, HandFront& front) {
    step_until(planner, front, [&] { return front.planners > 0; });
  }

  // Once the planner has nothing to do: it is written twice a second.
  json status_when_idle(Planner& planner) const {
    for (int i = 0; i < 12; ++i) {
      planner.step();
    }
    return json::parse(testing_support::read_file(at("run") / "status.json"));
  }

  void expect_predicted(const HandFront& front) const {
    for (const auto& [id, result] : front.results) {
      const Asked& asked = asked_.at(id);
      const json& body = result["response"]["body"];
      ASSERT_EQ(body["choices"].size(), static_cast<std::size_t>(asked.choices)) << id;
      EXPECT_EQ(body["usage"]["completion_tokens"], asked.choices * asked.max_tokens) << id;
      for (int choice = 0; choice < asked.choices; ++choice) {
        expect_predicted(front, id, choice, body["choices"][static_cast<std::size_t>(choice)]);
      }
    }
  }

  void expect_predicted(const HandFront& front, std::uint32_t id, int choice,
                        const json& told) const {
    const Asked& asked = asked_.at(id);
    const std::uint64_t seed = asked.seed + static_cast<std::uint64_t>(choice);
    std::vector<TokenId> text = asked.prompt, answer;
    for (int step = 0; step < asked.max_tokens; ++step) {
      answer.push_back(symbolic_token(text, seed ^ static_cast<std::uint64_t>(step)));
      text.push_back(answer.back());
    }
    EXPECT_EQ(told["token_ids"], answer) << id << ", " << choice;
    EXPECT_EQ(told["index"], choice) << id;
    if (const auto streamed = front.streamed.find({id, choice}); streamed != front.streamed.end()) {
      answer.pop_back();  // the last token comes with the result
      EXPECT_EQ(streamed->second, answer) << id << ", " << choice;
    }
  }

  testing_support::TempDirectory folder_;
  std::mt19937 random_{18};
  std::map<std::uint32_t, Asked> asked_;
  SealedModel model_{new_run_id()};
  FakeLoader loader_{at("loader.sock"), model_.identity()};
  FakeExecutor executor_{at("executor.sock"), model_.identity(), loader_};
};

TEST_F(OpenArrival, RequestsAreAnsweredWhileOthersCome) {
  HandFront front(at("front.sock"));
  Planner planner(options());
  step_until_met(planner, front);
  for (std::uint32_t id = 1; id <= 10; ++id) {
    ask(front, id, any_request());
  }
  step_until(planner, front, [&] { return front.results.size() >= 3; });
  for (std::uint32_t id = 11; id <= 20; ++id) {
    ask(front, id, any_request());
  }
  step_until(planner, front, [&] { return front.results.size() == 20; });
  // Between two requests the planner waits, and then goes on. That time is no iteration's.
  const Seconds idle_until = monotonic_now() + Seconds{1.3};
  step_until(planner, front, [&] { return monotonic_now() > idle_until; });
  ask(front, 21, any_request(4));
  step_until(planner, front, [&] { return front.results.size() == 21; });
  expect_predicted(front);
  const Seconds written = monotonic_now() + Seconds{0.6};  // the status is, twice a second
  step_until(planner, front, [&] { return monotonic_now() > written; });
  const json status = json::parse(testing_support::read_file(at("run") / "status.json"));
  EXPECT_EQ(status["state"], "running");
  for (const json& iteration : status["balance"]["last"]) {
    EXPECT_LT(iteration.value("seconds", 0.0), 1.2) << iteration["iteration"];
  }
}

TEST_F(OpenArrival, ALineGetsAllItsChoices) {
  HandFront front(at("front.sock"));
  Planner planner(options());
  step_until_met(planner, front);
  for (std::uint32_t id = 1; id <= 8; ++id) {
    Asked asked = any_request();
    asked.choices = 1 + static_cast<int>(id % 4) * 3;
    ask(front, id, asked);
  }
  step_until(planner, front, [&] { return front.results.size() >= 2; });
  for (std::uint32_t id = 1; id <= 4; ++id) {
    front.cancel(id);
  }
  step_until(planner, front, [&] {
    return front.results.contains(5) && front.results.contains(6) && front.results.contains(7) &&
           front.results.contains(8);
  });
  expect_predicted(front);
  EXPECT_TRUE((front.streamed.contains({6, 2})));
  ask(front, 9, any_request());
  step_until(planner, front, [&] { return front.results.contains(9); });
  const json status = status_when_idle(planner);
  EXPECT_EQ(status["running"], 0);
  EXPECT_EQ(status["done"], front.results.size());
  EXPECT_EQ(status["requests"], front.results.size());
}

TEST_F(OpenArrival, TheLongestRequestsHaveRoom) {
  HandFront front(at("front.sock"));
  RunOptions run = options();
  run.batch.max_num_seqs = 1;
  Planner planner(run);
  step_until_met(planner, front);
  for (const int prompt : {1, kModelContext / 2, kModelContext - 1}) {
    Asked asked = any_request();
    asked.prompt.assign(static_cast<std::size_t>(prompt), TokenId{3});
    asked.max_tokens = kModelContext - prompt;
    ask(front, static_cast<std::uint32_t>(prompt), asked);
  }
  step_until(planner, front, [&] { return front.results.size() == 3; });
  expect_predicted(front);
}

TEST_F(OpenArrival, ACancelledRequestGivesItsBlocksBack) {
  HandFront front(at("front.sock"));
  Planner planner(options());
  step_until_met(planner, front);
  Asked endless = any_request();
  endless.prompt.resize(4);
  endless.max_tokens = kModelContext - 4;
  for (std::uint32_t id = 2; id <= 8; id += 2) {
    ask(front, id, endless);
  }
  step_until(planner, front, [&] { return front.streamed.size() == 4; });
  for (std::uint32_t id = 4; id <= 8; id += 2) {
    front.cancel(id);
  }
  step_until(planner, front, [&] { return !front.results.empty(); });
  EXPECT_EQ(front.results.size(), 1u);
  expect_predicted(front);
  EXPECT_LT((front.streamed[{8, 0}].size()), (front.streamed[{2, 0}].size()));
  ask(front, 9, any_request());
  step_until(planner, front, [&] { return front.results.contains(9); });
  const json status = status_when_idle(planner);
  EXPECT_EQ(status["running"], 0);
  EXPECT_EQ(status["blocks"]["free"],
            status["blocks"]["act"].get<int>() + status["blocks"]["kv"].get<int>());
}

TEST_F(OpenArrival, AnExecutorThatDiesCostsNoAnswer) {
  executor_.dies_of = 3;
  HandFront front(at("front.sock"));
  RunOptions run = options();
  run.death_descriptor = 0;  // a supervisor replaces executors
  Planner planner(run);
  step_until_met(planner, front);
  for (std::uint32_t id = 1; id <= 6; ++id) {
    ask(front, id, any_request());
  }
  step_until(planner, front, [&] { return front.results.size() == 6; });
  EXPECT_EQ(front.results[3]["response"]["body"]["error"]["code"], "worker_crash");
  front.results.erase(3);
  expect_predicted(front);
}

}  // namespace
}  // namespace poise
