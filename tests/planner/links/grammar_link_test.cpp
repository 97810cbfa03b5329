// The link to the process of grammars, with a process that plays one: a grammar's text says what it does.

#include "planner/links/grammar_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "common/trouble.h"

namespace poise {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

// A mask's first word is how many tokens the answer has, as far as this process was told.
constexpr const char* kScript = R"(import json, os, signal, socket, struct, sys, time
stream = socket.socket(fileno=0)
def read(size):
    data = b""
    while len(data) < size:
        block = stream.recv(size - len(data))
        if not block:
            os._exit(0)
        data += block
    return data
def frame():
    return json.loads(read(struct.unpack("<I", read(4))[0]))
def packed(data):
    return struct.pack("<I", len(data)) + data
def say(data):
    stream.sendall(packed(data))
hello = frame()
if hello["model"] == "slow":
    time.sleep(0.8)
if hello["model"] == "halted":
    os.kill(os.getpid(), signal.SIGSTOP)
if hello["model"] == "none":
    say(b"eneeds something")
    os._exit(0)
say(b"m")
told = {}
while True:
    asked = frame()
    for number in asked["drop"]:
        del told[number]
    said = b""
    for wish in asked["wishes"]:
        if "grammar" in wish:
            told[wish["id"]] = [wish["grammar"], 0]
        grammar = told[wish["id"]]
        grammar[1] += len(wish["tokens"])
        if grammar[0] == "abort":
            os.abort()
        if grammar[0] == "slow":
            os.kill(os.getpid(), signal.SIGPROF)
        if grammar[0] == "killed" or (grammar[0] == "killed once" and not os.path.exists(hello["model"])):
            open(hello["model"], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if grammar[0] == "halted" or (grammar[0] == "halted once" and not os.path.exists(hello["model"])):
            open(hello["model"], "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)
        if grammar[0] == "long":
            until = time.process_time() + 0.6
            while time.process_time() < until:
                pass
        if grammar[0] == "wrong":
            said += packed(b"edoes not compile")
        else:
            words = (hello["vocab_size"] + 31) // 32
            said += packed(b"m" + struct.pack(f"<{words}I", grammar[1], *[len(told)] * (words - 1)))
    stream.sendall(said)
)";

class GrammarLinkTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "grammars" + std::to_string(getpid());
    std::filesystem::create_directories(folder_);
    std::ofstream(folder_ + "/worker.py") << kScript;
    link_ = std::make_unique<GrammarLink>(program());
  }
  void TearDown() override {
    link_.reset();
    std::filesystem::remove_all(folder_);
  }
  GrammarProgram program() const {
    return {.python = "/usr/bin/python3",
            .script = folder_ + "/worker.py",
            .model = folder_ + "/mark",
            .vocab_size = 70,
            .eos = {2}};
  }
  static std::shared_ptr<const Grammar> grammar(const std::string& text) {
    return std::make_shared<Grammar>(Grammar{.param = "structured_outputs", .text = text});
  }
  GrammarMask ask(std::uint32_t request, const std::shared_ptr<const Grammar>& form,
                  std::size_t tokens) {
    const std::vector<TokenId> answer(tokens, 7);
    const GrammarWish wish{{request}, form, answer};
    return link_->masks({&wish, 1}).at(0);
  }
  // How many tokens the process knows of, or why there is no mask.
  std::string told(std::uint32_t request, const std::shared_ptr<const Grammar>& form,
                   std::size_t tokens) {
    const GrammarMask mask = ask(request, form, tokens);
    EXPECT_EQ(mask.words.size(), mask.refusal.empty() ? 3u : 0u);
    return mask.refusal.empty() ? std::to_string(mask.words[0]) : mask.refusal;
  }

  std::string folder_;
  std::unique_ptr<GrammarLink> link_;
};

TEST_F(GrammarLinkTest, AnAnswersTokensAreToldOnce) {
  const auto form = grammar("free");
  EXPECT_FALSE(link_->knows({5}));
  EXPECT_EQ(told(5, form, 0), "0");
  EXPECT_TRUE(link_->knows({5}));
  EXPECT_EQ(told(5, form, 1), "1");
  EXPECT_EQ(told(5, form, 1), "1");
  EXPECT_EQ(told(5, form, 4), "4");
  EXPECT_EQ(told(5, form, 2), "2") << "it began again";
  EXPECT_EQ(told(6, form, 3), "3");
  EXPECT_EQ(told(5, grammar("free"), 1), "1") << "another request of that number";
}

TEST_F(GrammarLinkTest, AProcessThatIsKilledIsReplacedAndToldEverything) {
  const auto form = grammar("free");
  EXPECT_EQ(told(5, form, 3), "3");
  const pid_t first = link_->pid();
  kill(first, SIGKILL);
  EXPECT_EQ(told(5, form, 4), "4");
  EXPECT_NE(link_->pid(), first);
  EXPECT_EQ(told(6, grammar("killed once"), 2), "2");
  EXPECT_EQ(told(5, form, 5), "5");
}

TEST_F(GrammarLinkTest, AGrammarThatEndsTheProcessIsRefusedAndTheOthersAreNot) {
  const std::vector<TokenId> answer(2, 7);
  std::vector<GrammarWish> wishes;
  for (const char* text : {"free", "abort", "wrong", "slow", "free", "killed"}) {
    wishes.push_back({{static_cast<std::uint32_t>(wishes.size())}, grammar(text), answer});
  }
  const std::vector<GrammarMask> masks = link_->masks(wishes);
  EXPECT_EQ(masks[0].words.at(0), 2u);
  EXPECT_THAT(masks[1].refusal, HasSubstr("was ended by signal 6"));
  EXPECT_EQ(masks[2].refusal, "does not compile");
  EXPECT_THAT(masks[3].refusal, HasSubstr("took more than its time"));
  EXPECT_EQ(masks[4].words.at(0), 2u);
  EXPECT_THAT(masks[5].refusal, HasSubstr("was ended by signal 9"));
  EXPECT_EQ(told(0, wishes[0].grammar, 3), "3");
}

TEST_F(GrammarLinkTest, AGrammarThatWasRefusedAtItsBeginningIsNotTriedAgain) {
  EXPECT_THAT(told(1, grammar("abort"), 0), HasSubstr("too costly"));
  const pid_t process = link_->pid();
  EXPECT_THAT(told(2, grammar("abort"), 0), HasSubstr("too costly"));
  EXPECT_EQ(link_->pid(), process) << "none was started, and none died";
}

TEST_F(GrammarLinkTest, AnswersThatAreNotAskedForAreForgotten) {
  const auto form = grammar("free");
  for (std::uint32_t request = 0; request < 200; ++request) {
    const GrammarMask mask = ask(request, form, 1);
    ASSERT_EQ(mask.words.at(0), 1u);
    ASSERT_LE(mask.words.at(1), 67u);
  }
  EXPECT_FALSE(link_->knows({0}));
  EXPECT_EQ(told(0, form, 2), "2");
}

TEST_F(GrammarLinkTest, NoneOfManyThatAreAskedTogetherIsForgotten) {
  const std::vector<TokenId> answer(2, 7);
  std::vector<GrammarWish> wishes;
  for (std::uint32_t request = 0; request < 200; ++request) {
    wishes.push_back({{request}, grammar("free"), answer});
  }
  for (const GrammarMask& mask : link_->masks(wishes)) {
    ASSERT_EQ(mask.words.at(0), 2u);
  }
  for (std::uint32_t request = 0; request < 200; ++request) {
    ASSERT_TRUE(link_->knows({request})) << request;
  }
  EXPECT_EQ(link_->masks(wishes).at(7).words.at(1), 200u);
}

// With these a process is silent after 0.4 s.
constexpr GrammarPatience kShort{.start = 3'000ms, .silence = 400ms, .word = 100ms};

TEST_F(GrammarLinkTest, AHaltedProcessIsReplacedAndNoLineIsRefused) {
  link_ = std::make_unique<GrammarLink>(program(), nullptr, kShort);
  const std::vector<TokenId> answer(2, 7);
  std::vector<GrammarWish> wishes;
  for (const char* text : {"free", "halted once", "free"}) {
    wishes.push_back({{static_cast<std::uint32_t>(wishes.size())}, grammar(text), answer});
  }
  testing::internal::CaptureStdout();
  for (const GrammarMask& mask : link_->masks(wishes)) {
    EXPECT_EQ(mask.refusal, "");
  }
  EXPECT_THAT(testing::internal::GetCapturedStdout(),
              AllOf(HasSubstr("waiting for the process of grammars"),
                    HasSubstr("the process of grammars neither spoke nor computed for 0.4 s; "
                              "another one goes on")));
  kill(link_->pid(), SIGSTOP);  // now all are asked together
  for (const GrammarMask& mask : link_->masks(wishes)) {
    EXPECT_EQ(mask.words.at(0), 2u);
  }
}

TEST_F(GrammarLinkTest, AProcessThatIsHaltedAgainAndAgainEndsTheRun) {
  link_ = std::make_unique<GrammarLink>(program(), nullptr, kShort);
  try {
    ask(1, grammar("halted"), 2);
    FAIL() << "a mask";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::interrupted);
    EXPECT_STREQ(failure.what(),
                 "the process of grammars neither spoke nor computed for 0.4 s, 3 times in a row");
  }
  GrammarProgram other = program();
  other.model = "halted";
  link_ = std::make_unique<GrammarLink>(
      other, nullptr, GrammarPatience{.start = 60'000ms, .silence = 400ms, .word = 100ms});
  EXPECT_THROW(ask(1, grammar("free"), 2), Failure);
}

TEST_F(GrammarLinkTest, ASlowStartAndLongComputingAreNoSilence) {
  GrammarProgram other = program();
  other.model = "slow";
  link_ = std::make_unique<GrammarLink>(other, nullptr, kShort);
  testing::internal::CaptureStdout();
  EXPECT_EQ(told(1, grammar("long"), 2), "2");
  EXPECT_THAT(testing::internal::GetCapturedStdout(), HasSubstr("is being started"));
}

TEST_F(GrammarLinkTest, AWishToStopIsHeardWhileItWaits) {
  bool stop = false, halted = false;
  int looks = 0;
  const auto stops = [&] { return stop || (halted && ++looks > 3); };
  link_ = std::make_unique<GrammarLink>(program(), stops);
  EXPECT_EQ(told(1, grammar("free"), 2), "2");
  kill(link_->pid(), SIGSTOP);
  halted = true;
  const std::vector<TokenId> answer(2, 7);
  const GrammarWish wish{{1}, grammar("free"), answer};
  EXPECT_TRUE(link_->masks({&wish, 1}).empty());
  EXPECT_EQ(link_->pid(), 0);
  stop = true;
  link_ = std::make_unique<GrammarLink>(program(), stops);
  EXPECT_TRUE(link_->masks({&wish, 1}).empty());
  EXPECT_EQ(link_->pid(), 0) << "none was started";
}

TEST_F(GrammarLinkTest, AnAnswerThatWasRefusedIsForgotten) {
  const auto form = grammar("free");
  EXPECT_EQ(ask(1, form, 1).words.at(1), 1u);
  EXPECT_EQ(told(2, grammar("wrong"), 1), "does not compile");
  EXPECT_EQ(ask(1, form, 2).words.at(1), 1u) << "how many answers the process has";
}

TEST_F(GrammarLinkTest, WithoutItsPackageEveryGrammarIsRefused) {
  link_ = std::make_unique<GrammarLink>(GrammarProgram{.vocab_size = 70});
  EXPECT_THAT(told(1, grammar("free"), 0), HasSubstr("pip install llguidance"));
  GrammarProgram other = program();
  other.model = "none";
  link_ = std::make_unique<GrammarLink>(other);
  EXPECT_EQ(told(1, grammar("free"), 0), "needs something");
  EXPECT_EQ(link_->pid(), 0);
  other.python = folder_ + "/none";
  link_ = std::make_unique<GrammarLink>(other);
  EXPECT_THAT(told(1, grammar("free"), 0), HasSubstr("No such file"));
}

}  // namespace
}  // namespace poise
