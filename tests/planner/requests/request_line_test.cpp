#include "planner/requests/request_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "common/device_memory.h"
#include "tests/planner/requests/request_support.h"

namespace poise {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing_support::byte_id;
using testing_support::kEos;
using testing_support::line_with;

constexpr std::int32_t kContext = 32;

class RequestLine : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { tokenizer_ = new Tokenizer(testing_support::byte_tokenizer()); }
  static void TearDownTestSuite() { delete tokenizer_; }

  static RequestRules rules() { return {kContext, testing_support::kRows, tokenizer_, 0}; }
  static RequestRules with_eos() {
    static const std::vector<TokenId> eos{kEos};
    RequestRules with = rules();
    with.eos = eos;
    return with;
  }
  static ParsedLine parse(std::string_view text, const RequestRules& rules) {
    return parse_request({7}, text, rules);
  }
  static Request request(std::string_view body, const RequestRules& with = rules()) {
    const ParsedLine parsed = parse(line_with(body), with);
    if (const auto* error = std::get_if<RequestError>(&parsed)) {
      ADD_FAILURE() << body << ": " << error->message;
      return {};
    }
    return std::get<Request>(parsed);
  }
  static RequestError error_of_line(std::string_view text, const RequestRules& with = rules()) {
    const ParsedLine parsed = parse(text, with);
    if (std::holds_alternative<Request>(parsed)) {
      ADD_FAILURE() << "accepted: " << text;
      return {};
    }
    return std::get<RequestError>(parsed);
  }
  static RequestError error(std::string_view body, const RequestRules& with = rules()) {
    return error_of_line(line_with(body), with);
  }

  static Tokenizer* tokenizer_;
};
Tokenizer* RequestLine::tokenizer_ = nullptr;

// A chat line with what the supervisor rendered of it.
ParsedLine chat(std::string_view body, const RequestRules& rules,
                std::string_view entry = R"({"line": 7, "prompt": "x</s>y"})") {
  return parse_request({7}, testing_support::chat_line_with(body), rules, entry);
}

TEST_F(RequestLine, AChatsPromptIsTheRenderedTextWithoutAnotherBos) {
  const Request made = std::get<Request>(chat("{}", rules()));
  EXPECT_TRUE(made.chat);
  EXPECT_THAT(made.prompt.get(), ElementsAre(byte_id('x'), kEos, byte_id('y')));
  EXPECT_EQ(made.sampling.max_tokens, kContext - 3) << "all that the context leaves";
  EXPECT_EQ(made.sampling.logprobs, -1);
  const struct {
    const char* body;
    std::int32_t max_tokens, logprobs;
  } cases[] = {
      {R"({"max_tokens":5})", 5, -1},
      {R"({"max_tokens":5,"max_completion_tokens":7})", 7, -1},
      {R"({"max_completion_tokens":1000})", kContext - 3, -1},
      {R"({"logprobs":true})", kContext - 3, 0},
      {R"({"logprobs":true,"top_logprobs":20})", kContext - 3, 20},
      {R"({"logprobs":false,"top_logprobs":0,"echo":false,"tool_choice":"auto"})", kContext - 3,
       -1},
  };
  for (const auto& [body, max_tokens, logprobs] : cases) {
    const Request one = std::get<Request>(chat(body, rules()));
    EXPECT_EQ(one.sampling.max_tokens, max_tokens) << body;
    EXPECT_EQ(one.sampling.logprobs, logprobs) << body;
  }
}

TEST_F(RequestLine, AChatThatCannotBeAnsweredNamesTheField) {
  RequestRules no_tokenizer = rules();
  no_tokenizer.tokenizer = nullptr;
  const std::string long_prompt =
      fmt::format(R"({{"line": 7, "prompt": "{}"}})", std::string(99, 'x'));
  const struct {
    const char* body;
    RequestRules with;
    std::string entry;
    const char *param, *code;
  } cases[] = {
      {R"({"logprobs":2})", rules(), R"({"prompt":"x"})", "logprobs", "invalid_value"},
      {R"({"logprobs":true,"top_logprobs":21})", rules(), R"({"prompt":"x"})", "top_logprobs",
       "invalid_value"},
      {R"({"top_logprobs":1})", rules(), R"({"prompt":"x"})", "top_logprobs", "invalid_value"},
      {R"({"max_tokens":0})", rules(), R"({"prompt":"x"})", "max_tokens", "invalid_value"},
      {R"({"max_completion_tokens":true})", rules(), R"({"prompt":"x"})", "max_completion_tokens",
       "invalid_value"},
      {R"({"n":129})", rules(), R"({"prompt":"x"})", "n", "invalid_value"},
      {R"({"echo":true})", rules(), R"({"prompt":"x"})", "echo", "unsupported_parameter"},
      {R"({"tool_choice":{"type":"function"}})", rules(), R"({"prompt":"x"})", "tool_choice",
       "unsupported_parameter"},
      {R"({"chat_template":"x"})", rules(), R"({"prompt":"x"})", "chat_template",
       "unsupported_parameter"},
      {R"({"response_format":{"type":"structural_tag"}})", rules(), R"({"prompt":"x"})",
       "response_format", "unsupported_parameter"},
      {"{}", no_tokenizer, R"({"prompt":"x"})", "messages", "invalid_value"},
      {"{}", rules(), R"({"prompt":""})", "messages", "invalid_value"},
      {"{}", rules(), long_prompt, "messages", "context_length_exceeded"},
      {"{}", rules(), R"({"error":"no","param":"messages","code":"chat_template_error"})",
       "messages", "chat_template_error"},
      {"{}", rules(), "", "url", "invalid_value"},
  };
  for (const auto& [body, with, entry, param, code] : cases) {
    const ParsedLine parsed = chat(body, with, entry);
    const auto* error = std::get_if<RequestError>(&parsed);
    ASSERT_NE(error, nullptr) << body << entry;
    EXPECT_EQ(error->param, param) << error->message;
    EXPECT_EQ(error->code, code) << error->message;
  }
}

TEST_F(RequestLine, DefaultsAreThoseOfVllm) {
  const Request made = request(R"({"prompt":"xy"})");
  EXPECT_EQ(made.id, RequestId{7});
  EXPECT_EQ(made.custom_id, "a");
  EXPECT_THAT(made.prompt.get(), ElementsAre(kEos, byte_id('x'), byte_id('y')));
  EXPECT_EQ(made.prompt_text, "");
  const SamplingParams& sampling = made.sampling;
  EXPECT_EQ(sampling.temperature, 1);
  EXPECT_EQ(sampling.top_p, 1);
  EXPECT_EQ(sampling.top_k, 0);
  EXPECT_EQ(sampling.max_tokens, 16);
  EXPECT_EQ(sampling.logprobs, -1);
  EXPECT_FALSE(sampling.echo);
  EXPECT_FALSE(sampling.ignore_eos);
  EXPECT_FALSE(sampling.return_token_ids);
  EXPECT_FALSE(sampling.tokens_as_ids);
  EXPECT_TRUE(sampling.stop.empty());
  EXPECT_TRUE(sampling.stop_token_ids.empty());
  EXPECT_EQ(sampling.seed, derived_seed(0, {7}));
}

TEST_F(RequestLine, NullMeansTheDefault) {
  const Request plain = request(R"({"prompt":"xy"})");
  const Request nulls = request(
      R"({"prompt":"xy","max_tokens":null,"temperature":null,"top_p":null,"top_k":null,"n":null,
      "seed":null,"stop":null,"stop_token_ids":null,"ignore_eos":null,"logprobs":null,"echo":null,
      "return_token_ids":null,"model":null,"stream":null,"suffix":null,"logit_bias":null,
      "presence_penalty":null,"best_of":null,"response_format":null,"add_special_tokens":null})");
  EXPECT_EQ(nulls.prompt, plain.prompt);
  EXPECT_EQ(nulls.sampling.max_tokens, plain.sampling.max_tokens);
  EXPECT_EQ(nulls.sampling.temperature, plain.sampling.temperature);
  EXPECT_EQ(nulls.sampling.seed, plain.sampling.seed);
}

TEST_F(RequestLine, EveryFieldArrives) {
  const Request made = request(
      R"({"prompt":"xy","max_tokens":5,"temperature":0.25,"top_p":0.5,"top_k":3,"seed":-3,
      "stop":["a","b"],"stop_token_ids":[9,8,9],"ignore_eos":true,"logprobs":4,"echo":true,
      "return_token_ids":true,"return_tokens_as_token_ids":true})");
  const SamplingParams& sampling = made.sampling;
  EXPECT_EQ(sampling.max_tokens, 5);
  EXPECT_EQ(sampling.temperature, 0.25f);
  EXPECT_EQ(sampling.top_p, 0.5f);
  EXPECT_EQ(sampling.top_k, 3);
  EXPECT_EQ(sampling.seed, static_cast<std::uint64_t>(-3));
  EXPECT_THAT(sampling.stop.get(), ElementsAre("a", "b"));
  EXPECT_THAT(sampling.stop_token_ids.get(), ElementsAre(8, 9));
  EXPECT_TRUE(sampling.ignore_eos);
  EXPECT_EQ(sampling.logprobs, 4);
  EXPECT_TRUE(sampling.echo);
  EXPECT_TRUE(sampling.return_token_ids);
  EXPECT_TRUE(sampling.tokens_as_ids);
  EXPECT_EQ(made.prompt_text, "xy");
}

TEST_F(RequestLine, WholeNumbersMayBeWrittenWithAPoint) {
  const Request made = request(
      R"({"prompt":[8.0,9],"max_tokens":8.0,"logprobs":2.0,"top_k":5e0,"seed":1e3,"n":1.0})");
  EXPECT_THAT(made.prompt.get(), ElementsAre(8, 9));
  EXPECT_EQ(made.sampling.max_tokens, 8);
  EXPECT_EQ(made.sampling.logprobs, 2);
  EXPECT_EQ(made.sampling.top_k, 5);
  EXPECT_EQ(made.sampling.seed, 1000u);
}

TEST_F(RequestLine, APromptComesInFourForms) {
  const auto text = ElementsAre(kEos, byte_id('x'));
  EXPECT_THAT(request(R"({"prompt":"x"})").prompt.get(), text);
  EXPECT_THAT(request(R"({"prompt":["x"]})").prompt.get(), text);
  EXPECT_THAT(request(R"({"prompt":[10,11]})").prompt.get(), ElementsAre(10, 11));
  EXPECT_THAT(request(R"({"prompt":[[10,11]]})").prompt.get(), ElementsAre(10, 11));
}

TEST_F(RequestLine, BosIsAddedToTextOnlyAndOnlyIfWanted) {
  EXPECT_THAT(request(R"({"prompt":"x","add_special_tokens":false})").prompt.get(),
              ElementsAre(byte_id('x')));
  EXPECT_THAT(request(R"({"prompt":""})").prompt.get(), ElementsAre(kEos));
  EXPECT_THAT(request(R"({"prompt":"</s>x"})").prompt.get(), ElementsAre(kEos, kEos, byte_id('x')));
}

TEST_F(RequestLine, AnEmptyPromptWithoutBosIsAnError) {
  const Tokenizer without = testing_support::byte_tokenizer(/*add_bos=*/false);
  const RequestRules rules{kContext, testing_support::kRows, &without, 0};
  for (const char* body : {R"({"prompt":""})", R"({"prompt":[""]})"}) {
    EXPECT_EQ(error(body, rules).param, "prompt") << body;
  }
  EXPECT_EQ(error(R"({"prompt":"","add_special_tokens":false})").param, "prompt");
}

TEST_F(RequestLine, EchoGivesBackTheTextOrDecodesTheIds) {
  EXPECT_EQ(request(R"({"prompt":"x</s>é","echo":true})").prompt_text, "x</s>é");
  EXPECT_EQ(request(R"({"prompt":[2,124,260],"echo":true})").prompt_text, "xab");
}

TEST_F(RequestLine, TokensAskedForAreCutToWhatTheContextLeaves) {
  EXPECT_EQ(request(R"({"prompt":[5,6],"max_tokens":1000000})").sampling.max_tokens, 30);
  EXPECT_EQ(request(R"({"prompt":[5,6],"max_tokens":1e10})").sampling.max_tokens, 30);
  EXPECT_EQ(request(R"({"prompt":[5,6],"max_tokens":9223372036854775807})").sampling.max_tokens,
            30);
  EXPECT_EQ(request(R"({"prompt":[5,6],"max_tokens":30})").most_context(), 31);
}

std::string ids(int count) {
  std::string list = "[5";
  for (int i = 1; i < count; ++i) {
    list += ",5";
  }
  return list + "]";
}

TEST_F(RequestLine, APromptBeyondTheContextIsAnErrorWithBothNumbers) {
  const RequestError beyond = error(fmt::format(R"({{"prompt":{}}})", ids(kContext + 1)));
  EXPECT_EQ(beyond.code, "context_length_exceeded");
  EXPECT_EQ(beyond.param, "prompt");
  EXPECT_THAT(beyond.message, HasSubstr("33"));
  EXPECT_THAT(beyond.message, HasSubstr("32"));

  const RequestError full = error(fmt::format(R"({{"prompt":{}}})", ids(kContext)));
  EXPECT_EQ(full.code, "context_length_exceeded");
  EXPECT_THAT(full.message, HasSubstr("no room"));

  EXPECT_EQ(request(fmt::format(R"({{"prompt":{}}})", ids(kContext - 1))).sampling.max_tokens, 1);
}

TEST_F(RequestLine, APromptThatFillsTheContextMayStillBeScored) {
  const Request scored =
      request(fmt::format(R"({{"prompt":{},"max_tokens":0,"echo":true}})", ids(kContext)));
  EXPECT_EQ(scored.sampling.max_tokens, 0);
  EXPECT_EQ(scored.most_context(), kContext);
  EXPECT_EQ(
      error(fmt::format(R"({{"prompt":{},"max_tokens":0,"echo":true}})", ids(kContext + 1))).code,
      "context_length_exceeded");
}

TEST_F(RequestLine, OfAPromptThatIsScoredTheLastTokenIsNotFed) {
  const Request scored = request(R"({"prompt":[5,6,7,8],"score_from":2})");
  EXPECT_THAT(scored.prompt.get(), ElementsAre(5, 6, 7));
  EXPECT_EQ(scored.scored_last, 8);
  EXPECT_EQ(scored.sampling.max_tokens, 0);
  EXPECT_TRUE(scored.sampling.prompt_logprobs());
  EXPECT_EQ(scored.first_valued(), 2u);
  EXPECT_EQ(scored.valued(), 2u);
  EXPECT_EQ(scored.most_context(), 3);
  EXPECT_EQ(scored.sampling.prompt_top, 1);
  EXPECT_EQ(scored.sampling.score_best, 0);
  const Request best = request(R"({"prompt":[5,6,7,8],"score_from":2,"score_best":20})");
  EXPECT_EQ(best.sampling.prompt_top, 20);
  EXPECT_EQ(best.sampling.score_best, 20);
  EXPECT_EQ(error(R"({"prompt":[5,6],"score_from":1,"score_best":21})").param, "score_best");

  // So it may be one token longer than the context.
  const auto with_ids = [](int count) {
    return fmt::format(R"({{"prompt":{},"score_from":1,"max_tokens":0}})", ids(count));
  };
  EXPECT_EQ(request(with_ids(kContext + 1)).most_context(), kContext);
  const RequestError longer = error(with_ids(kContext + 2));
  EXPECT_EQ(longer.code, "context_length_exceeded");
  EXPECT_EQ(longer.param, "prompt");
}

TEST_F(RequestLine, APromptIsScoredFromAPlaceBehindItsFirstTokenAndNothingElseIsAsked) {
  for (const char* body :
       {R"("score_from":0)", R"("score_from":4)", R"("score_from":1.5)",
        R"("score_from":2,"max_tokens":1)", R"("score_from":2,"echo":true)",
        R"("score_from":2,"logprobs":0)", R"("score_from":2,"prompt_logprobs":0)",
        R"("score_from":2,"n":2,"temperature":1)", R"("score_from":2,"logit_bias":{"5":1})",
        R"("score_from":2,"repetition_penalty":2)", R"("score_from":2,"min_p":0.5)"}) {
    EXPECT_EQ(error(fmt::format(R"({{"prompt":[5,6,7,8],{}}})", body)).param, "score_from") << body;
  }
  EXPECT_THAT(error(R"({"prompt":[5],"score_from":1})").message, HasSubstr("two tokens"));
  EXPECT_EQ(std::get<RequestError>(chat(R"({"score_from":1})", rules())).param, "score_from");
}

TEST_F(RequestLine, TinyTemperaturesAreGreedyAndTinyTopPStaysAboveZero) {
  EXPECT_EQ(request(R"({"prompt":"x","temperature":0})").sampling.temperature, 0);
  EXPECT_EQ(request(R"({"prompt":"x","temperature":-0.0})").sampling.temperature, 0);
  EXPECT_EQ(request(R"({"prompt":"x","temperature":1e-6})").sampling.temperature, 0);
  EXPECT_EQ(request(R"({"prompt":"x","temperature":2})").sampling.temperature, 2);
  EXPECT_GT(request(R"({"prompt":"x","top_p":1e-300})").sampling.top_p, 0);
}

TEST_F(RequestLine, TopKOfNoneOrTheWholeVocabularyIsNoCut) {
  for (const char* k : {"-1", "0", "300", "1e9"}) {
    EXPECT_EQ(request(fmt::format(R"({{"prompt":"x","top_k":{}}})", k)).sampling.top_k, 0) << k;
  }
  EXPECT_EQ(request(R"({"prompt":"x","top_k":299})").sampling.top_k, 299);
}

TEST_F(RequestLine, SeedsOfLinesAndRunsDiffer) {
  std::set<std::uint64_t> seeds;
  for (std::uint32_t line = 1; line <= 1000; ++line) {
    for (std::uint64_t run : {0, 1, 2}) {
      seeds.insert(derived_seed(run, {line}));
    }
  }
  EXPECT_EQ(seeds.size(), 3000u);
  EXPECT_EQ(derived_seed(5, {9}), derived_seed(5, {9}));
  RequestRules other = rules();
  other.run_seed = 5;
  EXPECT_EQ(request(R"({"prompt":"x"})", other).sampling.seed, derived_seed(5, {7}));
  EXPECT_EQ(request(R"({"prompt":"x","seed":0})", other).sampling.seed, 0u);
}

TEST_F(RequestLine, WhatSteersOnlyTheServiceOrIsUnknownIsIgnored) {
  for (const char* field :
       {R"("user":"me")", R"("user":5)", R"("stream_options":{"include_usage":true})",
        R"("priority":3)", R"("request_id":"x")", R"("cache_salt":"x")", R"("model":"any")",
        R"("invented":[1,{"a":2}])", R"("metadata":{})", R"("length_penalty":2)",
        R"("spaces_between_special_tokens":false)"}) {
    EXPECT_EQ(request(fmt::format(R"({{"prompt":"x",{}}})", field)).prompt.size(), 2u) << field;
  }
}

TEST_F(RequestLine, WhereTheModelHasANameARequestForAnotherIsAnError) {
  RequestRules named = rules();
  named.model = "facebook/opt-125m";
  EXPECT_EQ(request(R"({"prompt":"x"})", named).prompt.size(), 2u);
  EXPECT_EQ(request(R"({"prompt":"x","model":null})", named).prompt.size(), 2u);
  EXPECT_EQ(request(R"({"prompt":"x","model":"facebook/opt-125m"})", named).prompt.size(), 2u);
  const RequestError refused = error(R"({"prompt":"x","model":"another"})", named);
  EXPECT_EQ(refused.param, "model");
  EXPECT_EQ(refused.code, "model_not_found");
  EXPECT_EQ(refused.message,
            "\"model\" must be \"facebook/opt-125m\", the name this run serves, not \"another\"");
}

TEST_F(RequestLine, WishesOfLogitsAreRead) {
  RequestRules with = rules();
  const std::vector<TokenId> eos{kEos};
  with.eos = eos;
  const auto wishes = [&](const char* fields) {
    return *request(fmt::format(R"({{"prompt":"xyx",{}}})", fields), with).sampling.wishes;
  };
  EXPECT_EQ(request(R"({"prompt":"x","presence_penalty":0,"logit_bias":{}})", with).sampling.wishes,
            nullptr);
  EXPECT_EQ(wishes(R"("presence_penalty":-2)").presence_penalty, -2);
  EXPECT_EQ(wishes(R"("frequency_penalty":0.5)").frequency_penalty, 0.5f);
  const LogitWishes repetition = wishes(R"("repetition_penalty":1.5)");
  EXPECT_EQ(repetition.repetition_penalty, 1.5f);
  EXPECT_THAT(repetition.constant,
              ElementsAre(ConstantWish{kEos, 0, true}, ConstantWish{byte_id('x'), 0, true},
                          ConstantWish{byte_id('y'), 0, true}));
  EXPECT_EQ(repetition.most_edits(10), 13);
  EXPECT_THAT(
      wishes(R"("logit_bias":{"5":1.5,"7":-1000,"0":200})").constant,
      ElementsAre(ConstantWish{0, 100.0f}, ConstantWish{5, 1.5f}, ConstantWish{7, -100.0f}));
  const LogitWishes some = wishes(R"("allowed_token_ids":[9,4,9,32],"logit_bias":{"5":1})");
  std::vector<std::uint32_t> mask(static_cast<std::size_t>(mask_words(with.vocab_size)));
  mask[0] = 1u << 4 | 1u << 9;
  mask[1] = 1;
  EXPECT_EQ(some.allowed, mask);
  EXPECT_EQ(some.most_edits(10), mask_edits(with.vocab_size) + 1);
  const SamplingParams least =
      request(R"({"prompt":"x","min_tokens":3,"stop_token_ids":[8],"min_p":0.25})", with).sampling;
  EXPECT_EQ(least.min_tokens, 3);
  EXPECT_EQ(least.min_p, 0.25f);
  EXPECT_THAT(least.wishes->barred_at_first, ElementsAre(kEos, 8));
  const SamplingParams text =
      request(R"({"prompt":"x","include_stop_str_in_output":true,"skip_special_tokens":false})")
          .sampling;
  EXPECT_TRUE(text.include_stop);
  EXPECT_TRUE(text.keep_special);
}

TEST_F(RequestLine, ABadWordIsBarredAtTheBeginningAndBehindASpace) {
  const auto words = [&](const char* list) {
    return request(fmt::format(R"({{"prompt":"x","bad_words":{}}})", list))
        .sampling.wishes->bad_words;
  };
  // With a space it has one token more: not the same word with another first token.
  EXPECT_THAT(words(R"(["cat"," \tq"])"),
              ElementsAre(ElementsAre(byte_id('c'), byte_id('a'), byte_id('t')),
                          ElementsAre(byte_id('q'))));
}

TEST_F(RequestLine, WishesOfLogitsOutOfRangeAreErrors) {
  for (const auto& [field, value] : {std::pair{"presence_penalty", "2.1"},
                                     {"presence_penalty", "\"1\""},
                                     {"frequency_penalty", "-3"},
                                     {"repetition_penalty", "0"},
                                     {"repetition_penalty", "-1"},
                                     {"repetition_penalty", "1e-42"},
                                     {"logit_bias", R"({"01":1})"},
                                     {"logit_bias", R"({"-0":1})"},
                                     {"min_p", "1.1"},
                                     {"min_p", "-0.1"},
                                     {"min_tokens", "17"},
                                     {"min_tokens", "-1"},
                                     {"min_tokens", "1.5"},
                                     {"logit_bias", "[]"},
                                     {"logit_bias", "{\"x\":1}"},
                                     {"logit_bias", "{\"\":1}"},
                                     {"logit_bias", "{\"-1\":1}"},
                                     {"logit_bias", "{\"100000\":1}"},
                                     {"logit_bias", "{\"5\":\"1\"}"},
                                     {"logit_bias", "{\"5\":null}"},
                                     {"allowed_token_ids", "[]"},
                                     {"allowed_token_ids", "5"},
                                     {"allowed_token_ids", "[100000]"},
                                     {"allowed_token_ids", "[\"5\"]"},
                                     {"bad_words", "\"x\""},
                                     {"bad_words", "[5]"},
                                     {"bad_words", "[\"\"]"},
                                     {"bad_words", "[\" \"]"},
                                     {"truncate_prompt_tokens", "0"},
                                     {"truncate_prompt_tokens", "-2"},
                                     {"truncate_prompt_tokens", "100000"},
                                     {"include_stop_str_in_output", "1"},
                                     {"skip_special_tokens", "\"no\""}}) {
    const RequestError refused = error(fmt::format(R"({{"prompt":"x","{}":{}}})", field, value));
    EXPECT_EQ(refused.param, field) << value;
    EXPECT_EQ(refused.code, "invalid_value") << field << ' ' << value;
    EXPECT_THAT(refused.message, HasSubstr(field)) << value;
  }
  const std::string long_stop((1 << 19) + 1, 'x');
  EXPECT_EQ(error(fmt::format(R"({{"prompt":"x","stop":["{0}","{0}"]}})", long_stop)).param, "stop");
  RequestRules bare = rules();
  bare.tokenizer = nullptr;
  EXPECT_THAT(error(R"({"prompt":[5],"bad_words":["x"]})", bare).message, HasSubstr("tokenizer"));
}

// A line with many choices and a long prompt has the prompt once.
TEST_F(RequestLine, ChoicesOfALineHaveWhatTheyShareOnce) {
  std::vector<Request> choices;
  std::uint32_t next = kFirstFurtherChoice;
  add_choices(request(R"({"prompt":"xyz","n":3,"stop":["a"],"stop_token_ids":[7],"echo":true})"),
              [&] { return RequestId{next++}; }, choices);
  ASSERT_EQ(choices.size(), 3u);
  for (const Request& one : choices) {
    EXPECT_EQ(&one.prompt.get(), &choices[0].prompt.get());
    EXPECT_EQ(&one.custom_id.get(), &choices[0].custom_id.get());
    EXPECT_EQ(&one.prompt_text.get(), &choices[0].prompt_text.get());
    EXPECT_EQ(&one.sampling.stop.get(), &choices[0].sampling.stop.get());
    EXPECT_EQ(&one.sampling.stop_token_ids.get(), &choices[0].sampling.stop_token_ids.get());
    EXPECT_EQ(one.prompt_text.get(), "xyz");
  }
}

TEST_F(RequestLine, ATruncatedPromptIsItsLastTokensBehindBos) {
  const auto prompt = [&](const char* fields) {
    return request(fmt::format(R"({{{}}})", fields)).prompt.get();
  };
  EXPECT_THAT(prompt(R"("prompt":"xyz","truncate_prompt_tokens":3)"),
              ElementsAre(kEos, byte_id('y'), byte_id('z')));
  EXPECT_THAT(prompt(R"("prompt":"xyz","truncate_prompt_tokens":1)"), ElementsAre(kEos));
  EXPECT_EQ(prompt(R"("prompt":"xyz","truncate_prompt_tokens":4)").size(), 4u);
  EXPECT_THAT(prompt(R"("prompt":"xyz","truncate_prompt_tokens":2,"add_special_tokens":false)"),
              ElementsAre(byte_id('y'), byte_id('z')));
  EXPECT_THAT(prompt(R"("prompt":[5,6,7,8],"truncate_prompt_tokens":2)"), ElementsAre(7, 8));
  // -1: what the context leaves beside the answer.
  const std::string longer(2 * kContext, 'x');
  const Request cut = request(fmt::format(
      R"({{"prompt":"{}","truncate_prompt_tokens":-1,"max_tokens":5,"echo":true}})", longer));
  EXPECT_EQ(cut.prompt.size(), static_cast<std::size_t>(kContext) - 5);
  EXPECT_EQ(cut.prompt_text, std::string(static_cast<std::size_t>(kContext) - 6, 'x'));
  EXPECT_EQ(cut.sampling.max_tokens, 5);
  const Request of_chat = std::get<Request>(chat(R"({"truncate_prompt_tokens":1})", rules()));
  EXPECT_THAT(of_chat.prompt.get(), ElementsAre(byte_id('y')));
}

TEST_F(RequestLine, AnAnswerOfAnyLengthCutsNoPromptThatFits) {
  const auto body = [](std::int32_t prompt, std::int32_t answer) {
    return fmt::format(R"({{"prompt":"{}","truncate_prompt_tokens":-1,"max_tokens":{}}})",
                       std::string(static_cast<std::size_t>(prompt) - 1, 'x'), answer);
  };
  for (const std::int32_t answer : {kContext - 1, kContext, 2 * kContext}) {
    for (const std::int32_t prompt : {3, kContext - 1}) {
      const Request whole = request(body(prompt, answer));
      EXPECT_EQ(std::ssize(whole.prompt), prompt);
      EXPECT_EQ(whole.sampling.max_tokens, std::min(answer, kContext - prompt));
    }
  }
  EXPECT_EQ(request(body(kContext, kContext - 1)).prompt.size(), 1u);
  EXPECT_EQ(error(body(kContext, kContext)).param, "truncate_prompt_tokens");
  // A chat's answer has no length where none is asked for: it gets what is left.
  const Request long_chat = std::get<Request>(
      chat(R"({"truncate_prompt_tokens":-1})", rules(),
           fmt::format(R"({{"line": 7, "prompt": "{}"}})", std::string(2 * kContext, 'x'))));
  EXPECT_EQ(std::ssize(long_chat.prompt), kContext - 1);
  EXPECT_EQ(long_chat.sampling.max_tokens, 1);
}

TEST_F(RequestLine, SeveralChoicesAreDrawnAndNotGreedy) {
  EXPECT_EQ(request(R"({"prompt":"x"})").choices, 1);
  EXPECT_EQ(request(R"({"prompt":"x","n":128,"best_of":128})").choices, 128);
  EXPECT_EQ(error(R"({"prompt":"x","n":2,"temperature":0})").param, "n");
  EXPECT_EQ(request(R"({"prompt":"x","n":1,"temperature":0})").choices, 1);
}

TEST_F(RequestLine, UnsupportedFieldsMayHoldTheValueThatChangesNothing) {
  for (const char* field :
       {R"("stream":false)", R"("best_of":1)", R"("logit_bias":{})", R"("presence_penalty":0)",
        R"("frequency_penalty":0.0)", R"("repetition_penalty":1)", R"("min_p":0)",
        R"("min_tokens":0)", R"("use_beam_search":false)", R"("include_stop_str_in_output":false)",
        R"("skip_special_tokens":true)", R"("bad_words":[])",
        R"("response_format":{"type":"text"})", R"("n":1)", R"("stop":[])"}) {
    EXPECT_EQ(request(fmt::format(R"({{"prompt":"x",{}}})", field)).prompt.size(), 2u) << field;
  }
}

TEST_F(RequestLine, WhatWouldChangeTheAnswerAndIsNotDoneIsAnError) {
  for (const char* field :
       {R"("stream":true)", R"("best_of":2)", R"("suffix":"x")", R"("suffix":"")",
        R"("repetition_detection":{})", R"("use_beam_search":true)", R"("watermarking":true)",
        R"("logits_processors":["x"])", R"("logprob_token_ids":[1])", R"("prompt_embeds":"x")",
        R"("response_format":{"type":"structural_tag"})",
        R"("structured_outputs":{"structural_tag":"x"})",
        R"("structured_outputs":{"json":{},"whitespace_pattern":" "})", R"("structural_tag":"x")",
        R"("guided_json":{})", R"("guided_regex":"x")", R"("guided_choice":["x"])",
        R"("guided_grammar":"x")", R"("best_of":3,"n":2)"}) {
    const RequestError refused = error(fmt::format(R"({{"prompt":"x",{}}})", field));
    const std::string_view name =
        std::string_view(field).substr(1, std::string_view(field).find('"', 1) - 1);
    EXPECT_EQ(refused.param, name);
    EXPECT_EQ(refused.code, "unsupported_parameter") << field;
    EXPECT_THAT(refused.message, HasSubstr(std::string(name)));
    EXPECT_EQ(refused.status, 400);
  }
}

// Its text is the line's own, in the line's order; what it costs beside edits is its mask.
TEST_F(RequestLine, AnAnswersFormIsKeptAsTheLineSaysIt) {
  const auto form = [&](const std::string& field) {
    const Request made = request(fmt::format(R"({{"prompt":"x",{}}})", field), with_eos());
    return made.sampling.wishes ? made.sampling.wishes->grammar : nullptr;
  };
  const auto text = [&](const std::string& field) { return form(field)->text; };
  EXPECT_EQ(form(R"("response_format":null,"structured_outputs":null)"), nullptr);
  EXPECT_EQ(form(R"("response_format":{"type":"text"})"), nullptr);
  EXPECT_EQ(form(R"("structured_outputs":{"regex":"a"})")->param, "structured_outputs");
  EXPECT_EQ(form(R"("response_format": {"type":"json_object"})")->param, "response_format");
  for (
      const char* field :
      {R"("response_format":{"type":"json_object"})",
       R"("response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"z":{"b":1,"a":[1,-2.50,1e3,true,null]},"a":{},"é\n":"x\\y"},"strict":true}})",
       R"("structured_outputs":{"json":"{}","disable_any_whitespace":true,"disable_additional_properties":false})",
       R"("structured_outputs":{"regex":"[a-z]+","json":null})",
       R"("structured_outputs":{"choice":["a","b"]})",
       R"("structured_outputs":{"grammar":"root ::= \"x\"","json_object":false})",
       R"("structured_outputs":{"json_object":true})"}) {
    EXPECT_EQ(text(field), fmt::format("{{{}}}", field));
  }
  EXPECT_EQ(
      text(
          R"("body":{"structured_outputs":{"regex":"no"}}, "structured_outputs" : { "regex" : "yes" } )"),
      R"({"structured_outputs":{"regex":"yes"}})");
  const Request made = request(
      R"({"prompt":"x","logit_bias":{"5":1},"structured_outputs":{"regex":"a"}})", with_eos());
  EXPECT_EQ(made.sampling.wishes->most_edits(9), 1 + made.sampling.wishes->mask_edits);
  EXPECT_GT(made.sampling.wishes->mask_edits, 0);
}

TEST_F(RequestLine, AFormThatCannotBeMeantIsAnError) {
  EXPECT_THAT(error(R"({"prompt":"x","structured_outputs":{"regex":"a"}})").message,
              HasSubstr("names no EOS token"));
  for (const char* field :
       {R"("response_format":"text")", R"("response_format":{})",
        R"("response_format":{"type":"json_schema"})",
        R"("response_format":{"type":"json_schema","json_schema":{"name":"x"}})",
        R"("response_format":{"type":"json_schema","json_schema":{"schema":[]}})",
        R"("structured_outputs":{})", R"("structured_outputs":[])",
        R"("structured_outputs":{"json":{},"regex":"x"})", R"("structured_outputs":{"json":5})",
        R"("structured_outputs":{"regex":""})", R"("structured_outputs":{"choice":[]})",
        R"("structured_outputs":{"choice":["a",""]})", R"("structured_outputs":{"choice":"a"})",
        R"("structured_outputs":{"grammar":{}})", R"("structured_outputs":{"json_object":"yes"})",
        R"("structured_outputs":{"json_object":false})",
        R"("structured_outputs":{"regex":"a","disable_any_whitespace":1})",
        R"("structured_outputs":{"regex":"a"},"response_format":{"type":"json_object"})",
        R"("ignore_eos":true,"structured_outputs":{"regex":"a"})"}) {
    const RequestError refused = error(fmt::format(R"({{"prompt":"x",{}}})", field), with_eos());
    const std::string_view name =
        std::string_view(field).substr(1, std::string_view(field).find('"', 1) - 1);
    EXPECT_EQ(refused.param, name) << field;
    EXPECT_EQ(refused.code, "invalid_value") << field;
  }
  const std::string long_one(1 << 20, 'a');
  EXPECT_THAT(
      error(fmt::format(R"({{"prompt":"x","structured_outputs":{{"regex":"{}"}}}})", long_one),
            with_eos())
          .message,
      HasSubstr("at most 1048576 are followed"));
}

TEST_F(RequestLine, TypesAndRangesAreStrictAndTheFieldIsNamed) {
  struct Row {
    const char* field;
    std::vector<const char*> values;
  };
  const std::vector<Row> table{
      {"max_tokens",
       {"-1", "1.5", "\"5\"", "true", "[]", "{}", "1e300", "18446744073709551615", "0"}},
      {"temperature", {"-0.1", "2.1", "\"1\"", "true", "[1]", "1e39"}},
      {"top_p", {"0", "-0.5", "1.0001", "\"1\"", "false", "-0.0"}},
      {"top_k", {"-2", "1.5", "\"1\"", "true"}},
      {"seed", {"1.5", "\"1\"", "true", "9223372036854775808", "1e19"}},
      {"logprobs", {"-1", "21", "1.5", "\"1\"", "true", "false"}},
      {"n", {"0", "-1", "1.5", "\"1\"", "true"}},
      {"echo", {"1", "0", "\"true\"", "[]"}},
      {"ignore_eos", {"1", "\"true\""}},
      {"return_token_ids", {"1", "\"yes\""}},
      {"return_tokens_as_token_ids", {"1"}},
      {"add_special_tokens", {"1", "\"no\""}},
      {"model", {"5", "true", "[]"}},
      {"stop", {"5", "true", "\"\"", "[\"a\",\"\"]", "[\"a\",5]", "[null]", "{}", "[[\"a\"]]"}},
      {"stop_token_ids", {"5", "\"5\"", "[\"5\"]", "[1.5]", "[-1]", "[true]", "[null]", "[1e10]"}},
      {"prompt", {"null",         "5",
                  "true",         "{}",
                  "[]",           "[[]]",
                  "[null]",       "[true]",
                  "[1.5]",        "[-1]",
                  "[300]",        "[5,\"a\"]",
                  "[5,[6]]",      "[\"a\",\"b\"]",
                  "[[5],[6]]",    "[\"a\",5]",
                  "[[\"a\"]]",    "[[[5]]]",
                  "[{}]",         "[4294967301]",
                  "[1e300]",      "[-4294967291]",
                  "[\"a\",null]", "[18446744073709551621]"}},
  };
  for (const Row& row : table) {
    for (const char* value : row.values) {
      const std::string body = std::string_view(row.field) == "prompt"
                                   ? fmt::format(R"({{"prompt":{}}})", value)
                                   : fmt::format(R"({{"prompt":"x","{}":{}}})", row.field, value);
      const RequestError refused = error(body);
      EXPECT_EQ(refused.param, row.field) << body;
      EXPECT_THAT(refused.message, HasSubstr(fmt::format("\"{}\"", row.field))) << body;
      EXPECT_EQ(refused.custom_id, "a");
      EXPECT_EQ(refused.message.find('\n'), std::string::npos);
    }
  }
}

TEST_F(RequestLine, TheEnvelopeIsHeldToo) {
  const std::string long_id((1 << 20) + 1, 'x');
  struct Row {
    std::string text;
    const char* param;
    std::optional<std::string> custom_id;
  };
  const std::vector<Row> table{
      {R"({"method":"POST","url":"/v1/completions","body":{"prompt":"x"}})", "custom_id", {}},
      {R"({"custom_id":null,"method":"POST","url":"/v1/completions","body":{}})", "custom_id", {}},
      {R"({"custom_id":5,"method":"POST","url":"/v1/completions","body":{}})", "custom_id", {}},
      {R"({"custom_id":"","method":"POST","url":"/v1/completions","body":{}})", "custom_id", ""},
      {fmt::format(R"({{"custom_id":"{}","method":"POST","url":"/v1/completions","body":{{}}}})", long_id),
       "custom_id", long_id},
      {R"({"custom_id":"b","url":"/v1/completions","body":{"prompt":"x"}})", "method", "b"},
      {R"({"custom_id":"b","method":"GET","url":"/v1/completions","body":{}})", "method", "b"},
      {R"({"custom_id":"b","method":5,"url":"/v1/completions","body":{}})", "method", "b"},
      {R"({"custom_id":"b","method":"POST","body":{"prompt":"x"}})", "url", "b"},
      {R"({"custom_id":"b","method":"POST","url":"/v1/chat/completions","body":{}})", "url", "b"},
      {R"({"custom_id":"b","method":"POST","url":["/v1/completions"],"body":{}})", "url", "b"},
      {R"({"custom_id":"b","method":"POST","url":"/v1/completions"})", "body", "b"},
      {R"({"custom_id":"b","method":"POST","url":"/v1/completions","body":null})", "body", "b"},
      {R"({"custom_id":"b","method":"POST","url":"/v1/completions","body":"x"})", "body", "b"},
      {R"({"custom_id":"b","method":"POST","url":"/v1/completions","body":[]})", "body", "b"},
      {R"({"custom_id":"b","method":"POST","url":"/v1/completions","body":{}})", "prompt", "b"},
  };
  for (const Row& row : table) {
    const RequestError refused = error_of_line(row.text);
    EXPECT_EQ(refused.param, row.param) << row.text;
    EXPECT_EQ(refused.custom_id, row.custom_id) << row.text;
  }
}

TEST_F(RequestLine, ALineThatIsNotJsonSaysItsNumber) {
  const std::string deep(100'000, '[');
  for (const std::string& text :
       {std::string("x"), std::string("{"), std::string("[1]"), std::string("5"),
        std::string("null"), std::string("{} {}"), line_with("{}") + line_with("{}"), deep,
        line_with(R"({"prompt":NaN})"), line_with("{\"prompt\":\"\xff\"}"),
        line_with(R"({"prompt":"\ud800"})"), line_with(R"({"prompt":"x","prompt":"y"})"),
        line_with(R"({"prompt":"x","temperature":1e999})"), std::string("{\"a\":\0}", 7)}) {
    const RequestError refused = error_of_line(text);
    EXPECT_EQ(refused.code, "invalid_json") << text.substr(0, 80);
    EXPECT_EQ(refused.custom_id, std::nullopt);
    EXPECT_THAT(refused.message, HasSubstr("line 7")) << text.substr(0, 80);
    EXPECT_LT(refused.message.size(), 300u);
  }
}

TEST_F(RequestLine, WithoutATokenizerOnlyIdsAreTaken) {
  const RequestRules bare{kContext, testing_support::kRows, nullptr, 0};
  const Request made = request(R"({"prompt":[[5,6]],"echo":true,"logprobs":1})", bare);
  EXPECT_THAT(made.prompt.get(), ElementsAre(5, 6));
  EXPECT_EQ(made.prompt_text, "");
  EXPECT_EQ(error(R"({"prompt":"x"})", bare).param, "prompt");
  EXPECT_EQ(error(R"({"prompt":["x"]})", bare).param, "prompt");
  EXPECT_EQ(error(R"({"prompt":[5],"stop":"x"})", bare).param, "stop");
  EXPECT_TRUE(request(R"({"prompt":[5],"stop":[]})", bare).sampling.stop.empty());
}

TEST_F(RequestLine, ATokenizerLargerThanTheModelIsNotBelieved) {
  RequestRules small = rules();
  small.vocab_size = testing_support::kAb;
  const RequestError refused = error(R"({"prompt":"xab"})", small);
  EXPECT_EQ(refused.param, "prompt");
  EXPECT_THAT(refused.message, HasSubstr("260"));
  EXPECT_EQ(request(R"({"prompt":"xa"})", small).prompt.size(), 3u);
}

TEST_F(RequestLine, ManyStopStringsAreBounded) {
  std::string list = "\"a\"";
  for (int i = 0; i < 1024; ++i) {
    list += ",\"a\"";
  }
  EXPECT_EQ(error(fmt::format(R"({{"prompt":"x","stop":[{}]}})", list)).param, "stop");
}

TEST_F(RequestLine, MessagesAreTheSameEachTime) {
  for (const char* body : {R"({"prompt":[1e300]})", R"({"prompt":"x","stop":{}})", "{"}) {
    EXPECT_EQ(error(body).message, error(body).message);
  }
}

}  // namespace
}  // namespace poise
