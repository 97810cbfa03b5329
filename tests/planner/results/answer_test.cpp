#include "planner/results/answer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "tests/planner/results/answer_support.h"
#include "tests/support/source_folder.h"

namespace poise {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using testing_support::AnswerTest;
using testing_support::byte_id;
using testing_support::kAb;
using testing_support::kAbc;
using testing_support::kBeyond;
using testing_support::kEos;
using testing_support::kEosList;
using testing_support::KeptAnswer;

TEST_F(AnswerTest, TheLineHasTheShapeOfABatchResult) {
  const Request asked = request(2);
  const json line = answered(asked, bytes("xy"));
  EXPECT_EQ(line, json::parse(R"({"id":"poise-12","custom_id":"a","response":{"status_code":200,
      "request_id":"req-12","body":{"id":"cmpl-12","object":"text_completion","created":0,
      "model":"model","choices":[{"index":0,"text":"xy","logprobs":null,"finish_reason":"length",
      "stop_reason":null}],
      "usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4}}},"error":null})"));
}

TEST_F(AnswerTest, TimeStandsWhereItIsAskedForAndNowhereElse) {
  const Request asked = request(1);
  KeptAnswer answer(asked, tokenizer_, kEosList);
  answer.push(byte_id('x'), {0, {}});
  json early = json::parse(answer.result_line("m", 1)),
       late = json::parse(answer.result_line("m", 99));
  EXPECT_EQ(late["response"]["body"]["created"], 99);
  early["response"]["body"].erase("created");
  late["response"]["body"].erase("created");
  EXPECT_EQ(early, late);
}

TEST_F(AnswerTest, EosEndsItAndLeavesNoText) {
  Request asked = request();
  asked.sampling.return_token_ids = true;
  const json line = answered(asked, {byte_id('x'), kEos});
  const json& body = line["response"]["body"];
  EXPECT_EQ(body["choices"][0]["text"], "x");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(body["choices"][0]["stop_reason"], nullptr);
  EXPECT_EQ(body["choices"][0]["token_ids"], (json{byte_id('x'), kEos}));
  EXPECT_EQ(body["choices"][0]["prompt_token_ids"], (json{kEos, byte_id('p')}));
  EXPECT_EQ(body["usage"]["completion_tokens"], 2);
}

TEST_F(AnswerTest, EosAsTheLastTokenAllowedIsAStop) {
  EXPECT_EQ(choice(request(2), {byte_id('x'), kEos})["finish_reason"], "stop");
}

TEST_F(AnswerTest, AnyOfSeveralEosEndsIt) {
  const std::vector<TokenId> several{kEos, byte_id('!')};
  const Request asked = request();
  KeptAnswer answer(asked, tokenizer_, several);
  answer.push(byte_id('x'), {0, {}});
  answer.push(byte_id('!'), {0, {}});
  ASSERT_TRUE(answer.finished());
  EXPECT_EQ(answer.reason(), FinishReason::stop);
  EXPECT_EQ(json::parse(answer.result_line("m"))["response"]["body"]["choices"][0]["text"], "x");
}

TEST_F(AnswerTest, IgnoredEosGoesOnAndIsStillNotText) {
  Request asked = request(3);
  asked.sampling.ignore_eos = true;
  const json made = choice(asked, {byte_id('x'), kEos, byte_id('y')});
  EXPECT_EQ(made["text"], "xy");
  EXPECT_EQ(made["finish_reason"], "length");
}

TEST_F(AnswerTest, StopIdsActEvenWhereEosIsIgnored) {
  Request asked = request();
  asked.sampling.ignore_eos = true;
  asked.sampling.stop_token_ids = {kEos, byte_id('q')};
  EXPECT_EQ(choice(asked, {byte_id('x'), kEos})["stop_reason"], kEos);
  const json made = choice(asked, {byte_id('x'), byte_id('q')});
  EXPECT_EQ(made["text"], "x");
  EXPECT_EQ(made["finish_reason"], "stop");
  EXPECT_EQ(made["stop_reason"], byte_id('q'));
}

TEST_F(AnswerTest, EosThatIsAlsoAStopIdIsEos) {
  Request asked = request();
  asked.sampling.stop_token_ids = {kEos};
  EXPECT_EQ(choice(asked, {kEos})["stop_reason"], nullptr);
}

TEST_F(AnswerTest, AStopStringIsNotPartOfTheText) {
  struct Row {
    const char* why;
    std::vector<std::string> stop;
    std::vector<TokenId> tokens;
    const char* text;
    const char* stop_reason;
  };
  const std::vector<Row> table{
      {"within a token", {"b"}, {byte_id('x'), kAbc}, "xa", "b"},
      {"over three tokens", {"xyz"}, bytes("wxyz"), "w", "xyz"},
      {"over the border of tokens", {"ba"}, {kAb, kAb}, "a", "ba"},
      {"at the very start", {"a"}, {kAbc}, "", "a"},
      {"the earliest wins, whatever the order", {"c", "b"}, {kAbc}, "a", "b"},
      {"at the same place the first named", {"b", "bc"}, {kAbc}, "a", "b"},
      {"at the same place the first named, longer", {"bc", "b"}, {kAbc}, "a", "bc"},
      {"the one that is complete first", {"xyz", "y"}, bytes("xy"), "x", "y"},
      {"after a false start", {"aab"}, bytes("aaab"), "a", "aab"},
      {"a newline", {"\n"}, bytes("hi\n"), "hi", "\n"},
      {"of several bytes", {"é"}, bytes("xé"), "x", "é"},
  };
  for (const Row& row : table) {
    Request asked = request();
    asked.sampling.stop = row.stop;
    asked.sampling.return_token_ids = true;
    const json made = choice(asked, row.tokens);
    EXPECT_EQ(made["text"], row.text) << row.why;
    EXPECT_EQ(made["finish_reason"], "stop") << row.why;
    EXPECT_EQ(made["stop_reason"], row.stop_reason) << row.why;
    EXPECT_EQ(made["token_ids"], json(row.tokens)) << row.why;
  }
}

TEST_F(AnswerTest, AStopStringBeatsLengthAndStopIds) {
  Request asked = request(2);
  asked.sampling.stop = {"y"};
  EXPECT_EQ(choice(asked, bytes("xy"))["finish_reason"], "stop");
  // The id's own text is never looked at, as in vLLM.
  asked = request();
  asked.sampling.stop = {"y"};
  asked.sampling.stop_token_ids = {byte_id('y')};
  EXPECT_EQ(choice(asked, bytes("xy"))["stop_reason"], byte_id('y'));
}

TEST_F(AnswerTest, WhatStopsIsTextWhereItIsWanted) {
  Request asked = request();
  asked.sampling.include_stop = true;
  asked.sampling.stop = {"yz", "q"};
  asked.sampling.stop_token_ids = {byte_id('s')};
  EXPECT_EQ(choice(asked, bytes("xyz"))["text"], "xyz");
  EXPECT_EQ(choice(asked, bytes("xyz"))["stop_reason"], "yz");
  EXPECT_EQ(choice(asked, bytes("xs"))["text"], "xs");
  // EOS is a special token: text only where those are.
  EXPECT_EQ(choice(asked, {byte_id('x'), kEos})["text"], "x");
  asked.sampling.keep_special = true;
  EXPECT_EQ(choice(asked, {byte_id('x'), kEos})["text"], "x" + tokenizer_->token_text(kEos));
  asked.sampling.include_stop = false;
  EXPECT_EQ(choice(asked, {byte_id('x'), kEos})["text"], "x");
}

TEST_F(AnswerTest, SpecialTokensAreTextWhereTheyAreKept) {
  Request asked = request(3);
  asked.sampling.ignore_eos = true;
  const std::vector<TokenId> tokens{byte_id('x'), kEos, byte_id('y')};
  EXPECT_EQ(choice(asked, tokens)["text"], "xy");
  asked.sampling.keep_special = true;
  EXPECT_EQ(choice(asked, tokens)["text"], "x" + tokenizer_->token_text(kEos) + "y");
}

TEST_F(AnswerTest, AmongTheFirstMinTokensNoStringStops) {
  Request asked = request();
  asked.sampling.stop = {"ab"};
  asked.sampling.min_tokens = 3;
  EXPECT_EQ(choice(asked, bytes("abxyab"))["text"], "abxy");
  // One that ends behind them stops.
  EXPECT_EQ(choice(asked, bytes("xxab"))["text"], "xx");
  // One that ends with them does not, and it is not found later.
  EXPECT_EQ(choice(asked, bytes("xabqqqqq"))["text"], "xabqqqqq");
}

TEST_F(AnswerTest, WhatMayYetBecomeAStopStringIsNotSettled) {
  std::mt19937 random(7);
  const auto word = [&](std::size_t most) {
    std::string made(1 + random() % most, 'a');
    for (char& letter : made) {
      letter = random() % 3 == 0 ? 'b' : 'a';
    }
    return made;
  };
  int held_back = 0;
  for (int i = 0; i < 2000; ++i) {
    Request asked = request(64);
    asked.sampling.stop = {word(9), word(4)};
    KeptAnswer answer(asked, tokenizer_, kEosList);
    std::string text;
    for (const char letter : word(20)) {
      answer.push(byte_id(static_cast<unsigned char>(letter)), {});
      text += letter;
      if (answer.finished()) {
        break;
      }
      std::size_t begun = 0;
      for (const std::string& stop : asked.sampling.stop) {
        for (std::size_t part = 1; part < stop.size(); ++part) {
          begun = text.ends_with(stop.substr(0, part)) ? std::max(begun, part) : begun;
        }
      }
      EXPECT_EQ(answer.settled_text(), text.substr(0, text.size() - begun)) << asked.sampling.stop[0];
      held_back += begun > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(held_back, 100);
}

TEST_F(AnswerTest, WhereEveryTokenIsBarredTheLineSaysSo) {
  const Request asked = request();
  KeptAnswer answer(asked, tokenizer_, kEosList);
  answer.push(byte_id('x'), {});
  answer.break_off(true);
  const json line = json::parse(answer.result_line("m"));
  EXPECT_EQ(line["response"]["status_code"], 400);
  EXPECT_EQ(line["response"]["body"]["error"]["code"], "no_token_allowed");
  EXPECT_THAT(line["response"]["body"]["error"]["message"].get<std::string>(),
              HasSubstr("place 2 of the answer"));
}

TEST_F(AnswerTest, PartsOfAStopStringStayInTheText) {
  Request asked = request(3);
  asked.sampling.stop = {"xyz!"};
  const json made = choice(asked, bytes("xyz"));
  EXPECT_EQ(made["text"], "xyz");
  EXPECT_EQ(made["finish_reason"], "length");
}

TEST_F(AnswerTest, StopStringsDoNotLookIntoThePrompt) {
  Request asked = request(2);
  asked.sampling.echo = true;
  asked.prompt_text = "xy";
  asked.sampling.stop = {"yz", "x"};
  EXPECT_EQ(choice(asked, bytes("zz"))["text"], "xyzz");
}

TEST_F(AnswerTest, AChatsAnswerIsAMessage) {
  Request asked = request(2);
  asked.chat = true;
  asked.sampling.return_token_ids = true;
  asked.sampling.logprobs = 2;
  KeptAnswer answer(asked, tokenizer_, kEosList);
  // The executor does not repeat the chosen token among the best.
  answer.push(byte_id('x'), {-1.0f, {{byte_id(0xc3), -0.5f}}});
  answer.push(byte_id('\n'), {-3.0f, {{kAb, -0.5f}, {kAbc, -1.0f}}});
  const json body = json::parse(answer.result_line("m"))["response"]["body"];
  EXPECT_EQ(body["id"], "chatcmpl-12");
  EXPECT_EQ(body["object"], "chat.completion");
  EXPECT_EQ(body["prompt_token_ids"], json(asked.prompt));
  EXPECT_EQ(body["usage"]["completion_tokens"], 2);
  const json choice = body["choices"][0];
  EXPECT_EQ(choice["message"],
            json({{"role", "assistant"}, {"content", "x\n"}, {"refusal", nullptr}}));
  EXPECT_FALSE(choice.contains("text"));
  EXPECT_EQ(choice["finish_reason"], "length");
  EXPECT_EQ(choice["token_ids"], json({byte_id('x'), byte_id('\n')}));
  const json content = choice["logprobs"]["content"];
  ASSERT_EQ(content.size(), 2u);
  EXPECT_EQ(content[0]["token"], "x");
  EXPECT_EQ(content[0]["bytes"], json({'x'}));
  EXPECT_EQ(content[0]["logprob"], -1.0);
  ASSERT_EQ(content[0]["top_logprobs"].size(), 2u) << "those asked for, and no other";
  EXPECT_EQ(content[0]["top_logprobs"][0],
            json({{"token", "\uFFFD"}, {"bytes", {0xef, 0xbf, 0xbd}}, {"logprob", -0.5}}));
  EXPECT_EQ(content[0]["top_logprobs"][1]["token"], "x");
  ASSERT_EQ(content[1]["top_logprobs"].size(), 2u);
  EXPECT_EQ(content[1]["top_logprobs"][1]["token"], "abc")
      << "the chosen one is not among the best";
  asked.sampling.logprobs = -1;
  KeptAnswer plain(asked, tokenizer_, kEosList);
  plain.push(kEos, {});
  EXPECT_EQ(json::parse(plain.result_line("m"))["response"]["body"]["choices"][0]["logprobs"],
            nullptr);
}

TEST(AnswerOfTextWithByteFallback, StopsAtOnceAndEchoKeepsTheSpaceBetween) {
  const Tokenizer tokenizer =
      Tokenizer::load(source_folder() / "tests" / "golden" / "tokenizer" / "llama2", 50000);
  const TokenId word = tokenizer.encode("the", false).front(), newline = 3 + '\n';
  const auto choice_of = [&](const Request& asked, const std::vector<TokenId>& tokens) {
    KeptAnswer answer(asked, &tokenizer, kEosList);
    for (const TokenId token : tokens) {
      EXPECT_FALSE(answer.finished());
      answer.push(token, {0, {}});
    }
    return json::parse(answer.result_line("m"))["response"]["body"]["choices"][0];
  };
  Request asked{{12}, "a", {1, word}, "", {}};
  asked.sampling.max_tokens = 2;
  EXPECT_EQ(choice_of(asked, {word, word})["text"], "the the");
  // A byte token is held back, for the next one may spoil it; as a stop string it counts at once.
  asked.sampling.max_tokens = 8;
  asked.sampling.stop = {"\n"};
  const json made = choice_of(asked, {word, newline});
  EXPECT_EQ(made["text"], "the");
  EXPECT_EQ(made["stop_reason"], "\n");
  asked.sampling.max_tokens = 1;
  asked.sampling.echo = true;
  asked.prompt_text = "Say";
  EXPECT_EQ(choice_of(asked, {word})["text"], "Say the");
}

TEST_F(AnswerTest, AnIncompleteLastCharacterShowsAsReplacement) {
  EXPECT_EQ(choice(request(2), bytes("x\xc3"))["text"], "x\ufffd");
  EXPECT_EQ(choice(request(3), {byte_id('x'), byte_id(0xf0), kEos})["text"], "x\ufffd");
  EXPECT_EQ(choice(request(3), bytes("x\xc3\xa9"))["text"], "xé");
}

TEST_F(AnswerTest, IdsWithoutATokenDecodeToNothing) {
  EXPECT_EQ(choice(request(3), {byte_id('x'), kBeyond, byte_id('y')})["text"], "xy");
}

TEST_F(AnswerTest, EchoPutsThePromptFirst) {
  Request asked = request(1);
  asked.sampling.echo = true;
  asked.sampling.return_token_ids = true;
  asked.prompt_text = "the prompt ";
  const json made = choice(asked, bytes("x"));
  EXPECT_EQ(made["text"], "the prompt x");
  EXPECT_EQ(made["token_ids"], json{byte_id('x')});
}

TEST_F(AnswerTest, ScoringAloneHasNoNewTokens) {
  Request asked = request(0);
  asked.sampling.echo = true;
  asked.sampling.logprobs = 0;
  asked.sampling.return_token_ids = true;
  asked.prompt_text = "p";
  KeptAnswer answer(asked, tokenizer_, kEosList);
  answer.set_prompt_values({{-2, {}}});
  EXPECT_FALSE(answer.finished());
  answer.finish_scoring();
  const json body = json::parse(answer.result_line("m"))["response"]["body"];
  EXPECT_EQ(body["choices"][0]["text"], "p");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(body["choices"][0]["token_ids"], json::array());
  EXPECT_EQ(body["choices"][0]["logprobs"]["token_logprobs"], (json{nullptr, -2.0}));
  EXPECT_EQ(body["usage"],
            json::parse(R"({"prompt_tokens":2,"completion_tokens":0,"total_tokens":2})"));
}

TEST_F(AnswerTest, WhatIsNotFiniteBecomesAnErrorLine) {
  const Request asked = request();
  KeptAnswer answer(asked, tokenizer_, kEosList);
  answer.push(byte_id('x'), {0, {}});
  answer.break_off();
  ASSERT_TRUE(answer.finished());
  EXPECT_EQ(answer.reason(), FinishReason::error);
  const json line = json::parse(answer.result_line("m", 5));
  EXPECT_EQ(line["custom_id"], "a");
  EXPECT_EQ(line["response"]["status_code"], 500);
  EXPECT_EQ(line["response"]["body"]["error"]["code"], "not_finite");
  EXPECT_EQ(line["response"]["body"]["error"]["type"], "server_error");
}

TEST_F(AnswerTest, ItsStateIsAFunctionOfWhatWasPushed) {
  Request asked = request(6);
  asked.sampling.stop = {"never"};
  asked.sampling.logprobs = 0;
  const std::vector<TokenId> tokens{kAb, byte_id(0xc3), byte_id(0xa9), kAbc, 3, byte_id('z')};
  KeptAnswer whole(asked, tokenizer_, kEosList);
  for (const TokenId token : tokens) {
    whole.push(token, {-1, {}});
  }
  for (std::size_t cut = 0; cut < tokens.size(); ++cut) {
    KeptAnswer first(asked, tokenizer_, kEosList);
    for (std::size_t i = 0; i < cut; ++i) {
      first.push(tokens[i], {-1, {}});
    }
    KeptAnswer moved = std::move(first);
    for (std::size_t i = cut; i < tokens.size(); ++i) {
      moved.push(tokens[i], {-1, {}});
    }
    EXPECT_EQ(moved.result_line("m"), whole.result_line("m"));
  }
}

TEST_F(AnswerTest, MisuseIsADefect) {
  const Request asked = request(1);
  KeptAnswer answer(asked, tokenizer_, kEosList);
  EXPECT_THROW(answer.result_line("m"), Defect);
  EXPECT_THROW(answer.finish_scoring(), Defect);
  EXPECT_THROW(answer.set_prompt_values({{0, {}}}), Defect);
  answer.push(byte_id('x'), {0, {}});
  EXPECT_THROW(answer.push(byte_id('x'), {0, {}}), Defect);
  EXPECT_THROW(answer.break_off(), Defect);
}

// The oracle: all text decoded at once, the earliest stop string searched for in every prefix.
TEST_F(AnswerTest, RandomAnswersAgreeWithDecodingEverythingAtOnce) {
  const auto seed = static_cast<unsigned>(::testing::UnitTest::GetInstance()->random_seed());
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937 random(seed);
  const std::vector<TokenId> pool{byte_id('a'),
                                  byte_id('b'),
                                  byte_id('c'),
                                  byte_id(0xc3),
                                  byte_id(0xa9),
                                  kAb,
                                  kAbc,
                                  byte_id(0xf0),
                                  byte_id(0x9f),
                                  byte_id(0x98),
                                  byte_id(0x80),
                                  kBeyond,
                                  1,
                                  byte_id('\n')};
  const std::vector<std::string> stops{"cab", "é", "abab", "bb", "ca", "😀", "\n\n", "abcabc"};
  for (int round = 0; round < 3000; ++round) {
    Request asked = request(12);
    std::vector<std::string> some(random() % 4);
    std::ranges::generate(some, [&] { return stops[random() % stops.size()]; });
    asked.sampling.stop = some;
    KeptAnswer answer(asked, tokenizer_, kEosList);
    while (!answer.finished()) {
      answer.push(pool[random() % pool.size()], {0, {}});
    }
    const std::vector<TokenId>& tokens = answer.tokens();
    std::string expected = tokenizer_->decode(tokens);
    std::size_t first = std::string::npos;
    for (const std::string& stop : asked.sampling.stop) {
      first = std::min(first, expected.find(stop));
    }
    const bool stopped = first != std::string::npos;
    expected.resize(std::min(first, expected.size()));
    const json made = json::parse(answer.result_line("m"))["response"]["body"]["choices"][0];
    EXPECT_EQ(made["text"], expected);
    EXPECT_EQ(made["finish_reason"], stopped ? "stop" : "length");
    if (stopped) {  // not a token too late
      const std::string before = tokenizer_->decode(std::span(tokens).first(tokens.size() - 1));
      for (const std::string& stop : asked.sampling.stop) {
        EXPECT_EQ(before.find(stop), std::string::npos);
      }
    } else {
      EXPECT_EQ(tokens.size(), 12u);
    }
  }
}

}  // namespace
}  // namespace poise
