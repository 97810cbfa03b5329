#include "planner/links/front_link.h"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

#include "common/files/json.h"
#include "planner/links/clock.h"
#include "tests/planner/tokenizer/byte_tokenizer.h"

namespace poise {
namespace {

using nlohmann::json;
using testing_support::byte_id;
using testing_support::byte_tokenizer;
using testing_support::kEos;

const std::vector<TokenId> kEnds{kEos};

// A channel whose other end is the test.
class KeptFrames final : public FrameChannel {
 public:
  bool send(std::span<const std::string> frames) override {
    if (full) {
      return false;
    }
    sent.emplace_back(frames.begin(), frames.end());
    return true;
  }
  std::vector<std::string> receive(Seconds) override {
    if (to_come.empty()) {
      return {};
    }
    auto frames = std::move(to_come.front());
    to_come.pop_front();
    return frames;
  }

  std::uint64_t ended() const override { return times_ended; }

  bool full = false;
  std::uint64_t times_ended = 0;
  std::vector<std::vector<std::string>> sent;
  std::deque<std::vector<std::string>> to_come;
};

class FrontLinkTest : public testing::Test {
 protected:
  FrontLinkTest() {
    auto frames = std::make_unique<KeptFrames>();
    frames_ = frames.get();
    link_ = std::make_unique<FrontLink>(
        std::move(frames),
        RequestRules{.context = 64, .vocab_size = testing_support::kRows, .tokenizer = &tokenizer_});
    frames_->to_come.push_back({R"({"front":"one"})"});
  }

  void submit(std::uint32_t id, const json& body, bool stream = false) {
    const json line{
        {"custom_id", "c"}, {"method", "POST"}, {"url", "/v1/completions"}, {"body", body}};
    const json head{{"submit", {{{"id", id}, {"line", id + 100}, {"stream", stream}}}}};
    frames_->to_come.push_back({head.dump(), line.dump()});
  }

  // The events of the last message, after a flush that sends it.
  json events() {
    frames_->sent.clear();
    EXPECT_TRUE(link_->flush({1}));
    json all = json::array();
    for (const auto& frames : frames_->sent) {
      const json message = json::parse(frames[0]);
      if (message.contains("events")) {
        all.insert(all.end(), message["events"].begin(), message["events"].end());
      }
    }
    return all;
  }

  const Tokenizer tokenizer_ = byte_tokenizer();
  KeptFrames* frames_;
  std::unique_ptr<FrontLink> link_;
};

TEST_F(FrontLinkTest, ARequestArrivesAsALineOfAFileWould) {
  submit(7, {{"prompt", "xy"}, {"max_tokens", 3}});
  EXPECT_TRUE(link_->step({0}));
  const auto arrived = link_->take_arrived();
  ASSERT_EQ(arrived.size(), 1u);
  EXPECT_EQ(arrived[0]->id, RequestId{7});
  EXPECT_EQ(arrived[0]->sampling.max_tokens, 3);
  EXPECT_EQ(arrived[0]->sampling.seed, derived_seed(0, RequestId{107}));
  EXPECT_TRUE(link_->take_arrived().empty());
}

TEST_F(FrontLinkTest, ABadLineIsAnsweredAtOnce) {
  submit(7, {{"prompt", "xy"}, {"max_tokens", -3}});
  link_->step({0});
  EXPECT_TRUE(link_->take_arrived().empty());
  EXPECT_EQ(events(), json::parse(R"([{"id":7,"frame":1}])"));
  const json line = json::parse(frames_->sent.back().at(1));
  EXPECT_EQ(line["response"]["status_code"], 400);
  EXPECT_EQ(line["response"]["body"]["error"]["param"], "max_tokens");
}

TEST_F(FrontLinkTest, AStreamSendsWhatIsNewInItsText) {
  submit(7, {{"prompt", "xy"}, {"stop", {"cd"}}}, true);
  link_->step({0});
  const Request& request = *link_->take_arrived().at(0);
  EXPECT_TRUE(link_->streams(request.id));
  Answer answer(request, &tokenizer_, kEnds);
  std::vector<TokenId> tokens;
  std::string text;
  for (const char letter : std::string("abcxc")) {
    tokens.push_back(byte_id(letter));
    answer.push(tokens.back(), {});
    link_->progress(request.id, answer, tokens);
    for (const json& event : events()) {
      EXPECT_EQ(event["at"], text.size());
      text += event["text"];
      EXPECT_EQ(event["tokens"], tokens.size());
    }
    EXPECT_EQ(text, answer.settled_text());
  }
  EXPECT_EQ(text, "abcx");  // the last letter may begin the stop string
}

TEST_F(FrontLinkTest, AStreamThatEchoesBeginsWithThePrompt) {
  submit(7, {{"prompt", "xy"}, {"echo", true}}, true);
  link_->step({0});
  const Request& request = *link_->take_arrived().at(0);
  EXPECT_TRUE(link_->streams(request.id));
  Answer answer(request, &tokenizer_, kEnds);
  std::vector<TokenId> tokens;
  std::vector<std::pair<std::size_t, std::string>> parts;
  for (const char letter : std::string("abc")) {
    tokens.push_back(byte_id(letter));
    answer.push(tokens.back(), {});
    link_->progress(request.id, answer, tokens);
    const json event = events().at(0);
    parts.emplace_back(event["at"], event["text"]);
  }
  EXPECT_THAT(parts, testing::ElementsAre(testing::Pair(0, "xya"), testing::Pair(3, "b"),
                                          testing::Pair(4, "c")));
}

TEST_F(FrontLinkTest, ALineWithChoicesArrivesAndEndsAsAWhole) {
  submit(7, {{"prompt", "xy"}, {"n", 3}, {"seed", 40}}, true);
  link_->step({0});
  const auto arrived = link_->take_arrived();
  ASSERT_EQ(arrived.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(arrived[i]->sampling.seed, 40 + i);
    EXPECT_EQ(arrived[i]->line(), RequestId{7});
    EXPECT_TRUE(link_->streams(arrived[i]->id));
  }
  Answer answer(*arrived[2], &tokenizer_, kEnds);
  const std::vector<TokenId> tokens{byte_id('a')};
  answer.push(tokens[0], {});
  link_->progress(arrived[2]->id, answer, tokens);
  const json event = events().at(0);
  EXPECT_EQ(event["id"], 7);
  EXPECT_EQ(event["choice"], 2);
  EXPECT_EQ(event["text"], "a");
  link_->finish({.request = {7}, .error = false, .text = "the line"});
  EXPECT_FALSE(link_->streams(arrived[1]->id));
  submit(8, {{"prompt", "xy"}, {"n", 2}});
  link_->step({0});
  EXPECT_EQ(link_->take_arrived().size(), 2u);
  frames_->to_come.push_back({R"({"cancel":[7,8]})"});
  link_->step({0});
  const auto cancelled = link_->take_cancelled();
  ASSERT_EQ(cancelled.size(), 2u);
  EXPECT_EQ(cancelled[1]->choice, 1);
}

TEST_F(FrontLinkTest, WhatCannotBeSentIsKept) {
  submit(7, {{"prompt", "xy"}});
  link_->step({0});
  frames_->full = true;
  link_->finish({.request = {7}, .error = false, .text = "the line"});
  EXPECT_FALSE(link_->flush({1}));
  frames_->full = false;
  EXPECT_EQ(events().size(), 1u);
  EXPECT_EQ(frames_->sent.back().at(1), "the line");
  EXPECT_TRUE(events().empty());
}

TEST_F(FrontLinkTest, ACancelledRequestIsGivenBackOnce) {
  submit(7, {{"prompt", "xy"}});
  link_->step({0});
  const Request* const request = link_->take_arrived().at(0);
  frames_->to_come.push_back({R"({"cancel":[7,8]})"});
  link_->step({0});
  EXPECT_THAT(link_->take_cancelled(), testing::ElementsAre(request));
  frames_->to_come.push_back({R"({"cancel":[7]})"});
  link_->step({0});
  EXPECT_TRUE(link_->take_cancelled().empty());
}

TEST_F(FrontLinkTest, OneThatIsCancelledBeforeItIsTakenNeverArrives) {
  submit(7, {{"prompt", "xy"}});
  frames_->to_come.push_back({R"({"cancel":[7]})"});
  link_->step({0});
  EXPECT_TRUE(link_->take_arrived().empty());
  EXPECT_TRUE(link_->take_cancelled().empty());
}

TEST_F(FrontLinkTest, RequestsOfAFrontThatWasReplacedAreDropped) {
  submit(7, {{"prompt", "xy"}});
  submit(8, {{"prompt", "xy"}});
  link_->step({0});
  EXPECT_EQ(link_->take_arrived().size(), 2u);
  link_->finish({.request = {8}, .error = false, .text = "for the first front"});
  frames_->to_come.push_back({R"({"front":"two"})"});
  submit(7, {{"prompt", "z"}});
  link_->step({0});
  EXPECT_EQ(link_->take_cancelled().size(), 1u);
  EXPECT_EQ(link_->take_arrived().size(), 1u);
  EXPECT_TRUE(events().empty());
}

TEST_F(FrontLinkTest, APlannerWhoseConnectionEndedAsksForEverythingAgain) {
  submit(7, {{"prompt", "xy"}});
  link_->step({0});
  EXPECT_EQ(link_->take_arrived().size(), 1u);
  EXPECT_TRUE(link_->flush({10}));
  const json before = json::parse(frames_->sent.at(0)[0]);
  link_->finish({.request = {8}, .error = false, .text = "lost"});
  frames_->times_ended = 1;
  link_->step({0});
  EXPECT_EQ(link_->take_cancelled().size(), 1u);
  frames_->sent.clear();
  EXPECT_TRUE(link_->flush({10}));
  ASSERT_EQ(frames_->sent.size(), 1u);
  EXPECT_NE(json::parse(frames_->sent[0][0])["planner"], before["planner"]);
  frames_->to_come.push_back({R"({"front":"one"})"});
  submit(7, {{"prompt", "xy"}});
  link_->step({0});
  EXPECT_EQ(link_->take_arrived().size(), 1u);
}

TEST_F(FrontLinkTest, AResultSaysHowLongEachPartTook) {
  submit(7, {{"prompt", "xy"}});
  link_->step({0});
  const double now = monotonic_now().n;
  Histogram between({0.5, 1.5});
  link_->ran({7}, false, {now + 1}, {now + 2}, between);
  link_->ran({7}, true, {now + 2}, {now + 4}, between);
  link_->ran({7}, true, {now + 4}, {now + 5}, between);
  link_->ran({7}, true, {now + 5}, {now + 7}, between);
  link_->finish({.request = {7}, .error = false, .text = "the line"});
  const json event = events().at(0);
  EXPECT_NEAR(event["waited"], 1, 0.1);
  EXPECT_NEAR(event["prefill"], 3, 1e-4);
  EXPECT_NEAR(event["decode"], 3, 1e-4);
  EXPECT_EQ(between.json()["counts"], (json{0, 1, 1}));
  EXPECT_NEAR(between.json()["sum"], 3, 1e-4);
}

TEST_F(FrontLinkTest, APlannerSaysWhoItIsOnceASecond) {
  EXPECT_TRUE(link_->flush({10}));
  EXPECT_TRUE(link_->flush({10.5}));
  EXPECT_EQ(frames_->sent.size(), 1u);
  EXPECT_TRUE(link_->flush({11.5}));
  ASSERT_EQ(frames_->sent.size(), 2u);
  EXPECT_EQ(json::parse(frames_->sent[0][0])["context"], 64);
}

}  // namespace
}  // namespace poise
