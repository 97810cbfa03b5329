// Directories that no tokenizer can be made from: each gives one sentence, at once.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/planner/tokenizer/tokenizer_directory.h"

namespace poise {
namespace {

using testing::HasSubstr;
using Json = nlohmann::json;

void expect_refused(const TokenizerDirectory& directory, const std::string& name,
                    const std::string& because, std::int64_t rows = 100000) {
  const std::optional<std::string> sentence = directory.failure(rows);
  ASSERT_TRUE(sentence.has_value()) << name;
  EXPECT_THAT(*sentence, HasSubstr(because)) << name;
  EXPECT_EQ(sentence->find('\n'), std::string::npos) << name;
  EXPECT_LT(sentence->size(), 600u) << name;
}

TEST(HostileTokenizerJson, EachIsRefusedInOneSentence) {
  struct Case {
    const char* name;
    std::function<void(Json&)> spoil;
    const char* because;
  };
  auto model = [](const char* field, Json value) {
    return [field, value](Json& json) { json["model"][field] = value; };
  };
  auto merge = [&model](Json one) { return model("merges", Json::array({std::move(one)})); };
  auto top = [](const char* field, Json value) {
    return [field, value](Json& json) { json[field] = value; };
  };
  auto vocabulary = [](const char* token, Json id) {
    return [token, id](Json& json) { json["model"]["vocab"][token] = id; };
  };
  auto add = [](Json token) {
    return [token](Json& json) { json["added_tokens"].push_back(token); };
  };
  auto split = [&top](Json pattern) {
    return top("pre_tokenizer",
               {{"type", "Split"}, {"pattern", pattern}, {"behavior", "Isolated"}});
  };
  // A vocabulary of text with this decoder.
  auto of_text = [](Json decoder) {
    return [decoder](Json& json) {
      json["pre_tokenizer"] = nullptr;
      json["decoder"] = decoder;
    };
  };
  const Case cases[] = {
      {"no model", top("model", nullptr), "\"model\" is missing"},
      {"model is a list", top("model", Json::array()), "must be an object"},
      {"WordPiece", model("type", "WordPiece"), "model \"WordPiece\" is not supported"},
      {"Unigram", model("type", "Unigram"), "model \"Unigram\" is not supported"},
      {"no vocabulary", model("vocab", nullptr), "must be an object of tokens"},
      {"vocabulary is a list", model("vocab", Json::array({"a", "b"})), "must be an object of tokens"},
      {"empty vocabulary", model("vocab", Json::object()), "is empty"},
      {"id is a string", vocabulary("zz", "7"), "must be an integer from 0"},
      {"id is a fraction", vocabulary("zz", 7.5), "must be an integer from 0"},
      {"id is negative", vocabulary("zz", -1), "must be an integer from 0"},
      {"id is 2^31", vocabulary("zz", 2147483648), "must be an integer from 0"},
      {"id is 2^64", vocabulary("zz", 1.8446744073709552e19), "must be an integer from 0"},
      {"id is far away", vocabulary("zz", 2000000000), "ids must lie closer"},
      {"two tokens with one id", vocabulary("zz", 3), "two tokens have the id 3"},
      {"merges missing", model("merges", nullptr), "\"merges\" must be a list"},
      {"merges are an object", model("merges", {{"a", "b"}}), "\"merges\" must be a list"},
      {"merge of an unknown token", merge("a z"), "needs the token \"z\""},
      {"merge into an unknown token", merge("b c"), "needs the token \"bc\""},
      {"merge of one", merge("a"), "two tokens with one space"},
      {"merge of three", merge("a b c"), "two tokens with one space"},
      {"merge of nothing", merge(""), "two tokens with one space"},
      {"merge is a number", merge(7), "must be a string or a pair"},
      {"merge is a triple", merge(Json::array({"a", "b", "c"})), "must be a string or a pair"},
      {"dropout", model("dropout", 0.1), "dropout 0.1 is not supported"},
      {"byte_fallback", model("byte_fallback", true), "byte_fallback true is not supported"},
      {"byte_fallback is a string", model("byte_fallback", "yes"), "must be true or false"},
      {"word prefix", model("continuing_subword_prefix", "##"), "continuing_subword_prefix"},
      {"word suffix", model("end_of_word_suffix", "</w>"), "end_of_word_suffix"},
      {"unknown unk_token", model("unk_token", "<unk>"), "\"unk_token\" must be in the vocabulary"},
      {"flag is a string", model("ignore_merges", "yes"), "must be true or false"},
      {"normalizer", top("normalizer", {{"type", "NFKC"}}),
       "normalizer \"NFKC\" is not supported"},
      {"normalizer by an expression",
       top("normalizer",
           {{"type", "Replace"}, {"pattern", {{"Regex", "(a+)+$"}}}, {"content", ""}}),
       "must have a \"String\""},
      {"normalizer of the empty text",
       top("normalizer", {{"type", "Replace"}, {"pattern", {{"String", ""}}}, {"content", "a"}}),
       "must have a \"String\""},
      {"normalizer without content",
       top("normalizer", {{"type", "Replace"}, {"pattern", {{"String", "a"}}}}),
       "\"content\" is missing"},
      {"an added token that the normalizer takes away",
       [](Json& json) {
         json["normalizer"] = {
             {"type", "Replace"}, {"pattern", {{"String", "x"}}}, {"content", ""}};
         json["added_tokens"] = Json::array({added_token(13, "xx")});
         json["added_tokens"][0]["normalized"] = true;
       },
       "leaves nothing of the added token \"xx\""},
      {"normalizers",
       top("normalizer", {{"type", "Sequence"}, {"normalizers", {{{"type", "Lowercase"}}}}}),
       "normalizer \"Lowercase\" is not supported"},
      {"bytes decoded that are text", top("pre_tokenizer", nullptr),
       "decoder \"ByteLevel\" is not supported"},
      {"Metaspace without a character", top("pre_tokenizer", {{"type", "Metaspace"}}),
       "\"replacement\" must be one character"},
      {"Metaspace of two characters",
       top("pre_tokenizer", {{"type", "Metaspace"}, {"replacement", "__"}}),
       "\"replacement\" must be one character"},
      {"Metaspace of an unknown scheme",
       top("pre_tokenizer",
           {{"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", "odd"}}),
       "\"odd\" is unknown"},
      {"Metaspace that contradicts itself",
       top("pre_tokenizer",
           {{"type", "Metaspace"}, {"replacement", "_"}, {"add_prefix_space", false}}),
       "\"add_prefix_space\""},
      {"Metaspace twice",
       top("pre_tokenizer", {{"type", "Sequence"},
                             {"pretokenizers",
                              {{{"type", "Metaspace"}, {"replacement", "_"}},
                               {{"type", "Metaspace"}, {"replacement", "-"}}}}}),
       "after Metaspace"},
      {"another pre-tokenizer", top("pre_tokenizer", {{"type", "Whitespace"}}),
       "\"Whitespace\" is not supported"},
      {"pre-tokenizer without type", top("pre_tokenizer", Json::object()), "\"type\" is missing"},
      {"pre-tokenizer is a string", top("pre_tokenizer", "ByteLevel"), "must be an object"},
      {"sequence without a list", top("pre_tokenizer", {{"type", "Sequence"}}), "must be a list"},
      {"after ByteLevel",
       top("pre_tokenizer", {{"type", "Sequence"},
                             {"pretokenizers", {{{"type", "ByteLevel"}}, {{"type", "Digits"}}}}}),
       "after ByteLevel"},
      {"pattern of a kind", split({{"Glob", "*"}}), "either \"Regex\" or \"String\""},
      {"pattern malformed", split({{"Regex", "("}}), "has a ( without )"},
      {"pattern unknown", split({{"Regex", "(?<=a)b"}}), "of another kind"},
      {"pattern of a script", split({{"Regex", "\\p{Han}"}}), "no general category"},
      {"pattern empty", split({{"String", ""}}), "a pattern of 0 bytes"},
      {"behavior unknown",
       top("pre_tokenizer",
           {{"type", "Split"}, {"pattern", {{"String", "a"}}}, {"behavior", "Odd"}}),
       "\"behavior\" \"Odd\" is unknown"},
      {"no decoder", top("decoder", nullptr), "a decoder other than \"ByteLevel\""},
      {"another decoder", top("decoder", {{"type", "Fuse"}}), "a decoder other than \"ByteLevel\""},
      {"no decoder of text", of_text(nullptr), "\"decoder\" is missing"},
      {"another decoder of text", of_text({{"type", "WordPiece"}}), "decoder \"WordPiece\""},
      {"a decoder that strips the end",
       of_text({{"type", "Strip"}, {"content", " "}, {"start", 0}, {"stop", 1}}), "\"stop\""},
      {"a decoder that strips nothing", of_text({{"type", "Strip"}, {"content", ""}}),
       "must be one character"},
      {"a decoder that replaces by an expression",
       of_text({{"type", "Replace"}, {"pattern", {{"Regex", "a"}}}, {"content", "b"}}),
       "must have a \"String\""},
      {"bytes after all is one text",
       of_text({{"type", "Sequence"},
                {"decoders", {{{"type", "Fuse"}}, {{"type", "ByteFallback"}}}}}),
       "decoder \"ByteFallback\" after Fuse"},
      {"words replaced after all is one text",
       of_text({{"type", "Sequence"},
                {"decoders",
                 {{{"type", "Fuse"}},
                  {{"type", "Replace"}, {"pattern", {{"String", "ab"}}}, {"content", "b"}}}}}),
       "decoder \"Replace\" after Fuse"},
      {"post-processor unknown", top("post_processor", {{"type", "Odd"}}),
       "post_processor \"Odd\""},
      {"template without text",
       top("post_processor", {{"type", "TemplateProcessing"}, {"single", Json::array()}}),
       "must have the text"},
      {"template with a token without ids",
       top("post_processor",
           {{"type", "TemplateProcessing"}, {"single", {{{"SpecialToken", {{"id", "x"}}}}}}}),
       "must give the ids of \"x\""},
      {"template with a pair",
       top("post_processor",
           {{"type", "TemplateProcessing"}, {"single", {{{"Sequence", {{"id", "B"}}}}}}}),
       "must have the text"},
      {"Roberta without cls", top("post_processor", {{"type", "RobertaProcessing"}}), "\"cls\""},
      {"Roberta with a name for an id",
       top("post_processor", {{"type", "RobertaProcessing"}, {"cls", {"a", "b"}}}), "a token id"},
      {"BOS beyond the model",
       top("post_processor",
           {{"type", "RobertaProcessing"}, {"cls", {"a", 100000}}, {"sep", {"a", 0}}}),
       "do not belong together"},
      {"added tokens are an object", top("added_tokens", Json::object()), "must be a list"},
      {"added token without content", add({{"id", 13}}), "\"content\" is missing"},
      {"added token without id", add({{"content", "<x>"}}), "\"id\" is missing"},
      {"added token with a string for an id", add({{"id", "13"}, {"content", "<x>"}}), "\"id\""},
      {"added token with a far id", add({{"id", 99}, {"content", "<x>"}}), "next free one is 13"},
      {"added token with another's id", add({{"id", 2}, {"content", "<x>"}}),
       "next free one is 13"},
      {"added token with a wrong id", add({{"id", 13}, {"content", "ab"}}), "it is 11"},
      {"added token with a long content", add({{"id", 13}, {"content", std::string(2000, 'x')}}),
       "an added token of 2000 bytes"},
      {"added twice",
       [](Json& json) {
         json["added_tokens"] = {added_token(13, "<x>"), added_token(14, "<x>")};
       },
       "is added twice"},
      {"a hole where an added token goes",
       [](Json& json) {
         json["model"]["vocab"].erase("-");
         json["added_tokens"] = Json::array({added_token(12, "<x>")});
       },
       "two tokens have the id 12"},
      {"flag of an added token", add({{"id", 13}, {"content", "<x>"}, {"lstrip", 1}}),
       "\"lstrip\""},
  };
  for (const Case& one : cases) {
    TokenizerDirectory directory;
    Json json = small_tokenizer();
    one.spoil(json);
    directory.write_json("tokenizer.json", json);
    expect_refused(directory, one.name, one.because);
  }
}

TEST(HostileTokenizerJson, EachTextThatIsNoDocumentIsRefused) {
  const std::string good = small_tokenizer().dump();
  const struct {
    const char* name;
    std::string text;
    const char* because;
  } cases[] = {
      {"empty", "", "not valid JSON"},
      {"torn", good.substr(0, good.size() / 2), "not valid JSON"},
      {"a list", "[]", "a JSON object is needed"},
      {"trailing", good + "{}", "not valid JSON"},
      {"a million lists", std::string(1000000, '['), "deep in one another"},
      {"a million objects",
       [] {
         std::string text;
         for (int n = 0; n < 200000; ++n) text += "{\"a\":";
         return text;
       }(),
       "deep in one another"},
      {"invalid UTF-8", "{\"\xFF\": 1}", "not valid JSON"},
      {"a token twice", R"({"model": {"vocab": {"a": 0, "a": 1}}})", "appears twice"},
      {"NaN", R"({"model": NaN})", "not valid JSON"},
      {"binary", std::string("\0\1\2\3", 4), "not valid JSON"},
  };
  for (const auto& [name, text, because] : cases) {
    TokenizerDirectory directory;
    directory.write("tokenizer.json", text);
    expect_refused(directory, name, because);
  }
}

TEST(HostileTokenizerJson, ReplacementsThatGrowTheTextWithoutEndAreStopped) {
  TokenizerDirectory directory;
  Json json = small_tokenizer();
  json["normalizer"] = {{"type", "Sequence"}, {"normalizers", Json::array()}};
  for (int n = 0; n < 60; ++n) {
    json["normalizer"]["normalizers"].push_back(
        {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}});
  }
  directory.write_json("tokenizer.json", json);
  const Tokenizer tokenizer = directory.load();
  try {
    tokenizer.encode(std::string(1000, 'a'));
    ADD_FAILURE() << "2^60 characters for each";
  } catch (const Failure& failure) {
    EXPECT_THAT(failure.what(), HasSubstr("normalizer makes more than"));
  }
}

TEST(HostileTokenizerFiles, MissingOnesNameTheWayAround) {
  TokenizerDirectory directory;
  expect_refused(directory, "nothing", "--skip-tokenizer-init");
  directory.write("tokenizer.model", "a sentencepiece model");
  expect_refused(directory, "sentencepiece alone", "save_pretrained('DIR')");
  std::filesystem::remove(directory.path() / "tokenizer.model");
  directory.write_json("vocab.json", small_tokenizer()["model"]["vocab"]);
  expect_refused(directory, "no merges", "holds vocab.json but not merges.txt");
  std::filesystem::remove(directory.path() / "vocab.json");
  directory.write("merges.txt", "a b\n");
  expect_refused(directory, "no vocabulary", "holds merges.txt but not vocab.json");
}

TEST(HostileTokenizerFiles, WhatIsNoRegularFileIsRefused) {
  TokenizerDirectory directory;
  const std::filesystem::path file = directory.path() / "tokenizer.json";
  std::filesystem::create_directory(file);
  expect_refused(directory, "a directory", "is a directory");
  std::filesystem::remove(file);
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  expect_refused(directory, "a pipe", "is a pipe");
  std::filesystem::remove(file);
  std::filesystem::create_symlink("/dev/zero", file);
  expect_refused(directory, "a device", "is a device");
  std::filesystem::remove(file);
  std::filesystem::create_symlink("nowhere", file);
  expect_refused(directory, "a broken link", "is not there");
  std::filesystem::remove(file);
  std::filesystem::create_symlink("tokenizer.json", file);
  expect_refused(directory, "a link to itself", "leads back to itself");
  std::filesystem::remove(file);
  directory.write_json("tokenizer.json", std::string());
  std::filesystem::resize_file(file, std::uintmax_t{1} << 40);
  expect_refused(directory, "a huge file", "at most");
}

TEST(HostileTokenizerFiles, AVocabularyWhollyBeyondTheModelIsRefused) {
  TokenizerDirectory directory;
  Json json = small_tokenizer();
  int id = 1000;
  for (auto& [token, value] : json["model"]["vocab"].items()) {
    value = id++;
  }
  directory.write_json("tokenizer.json", json);
  expect_refused(directory, "beyond", "the model has 1000 rows", 1000);
  EXPECT_EQ(directory.failure(1001), std::nullopt) << "one token the model does have";
}

TEST(HostileTokenizerFiles, EachVocabularyWithMergesIsRefused) {
  const struct {
    const char* name;
    const char* file;
    std::string content;
    const char* because;
  } cases[] = {
      {"no object", "vocab.json", "[]", "must be an object of tokens"},
      {"empty", "vocab.json", "{}", "is empty"},
      {"one id twice", "vocab.json", R"({"a": 0, "b": 0})", "two tokens have the id 0"},
      {"not JSON", "vocab.json", "a 0\n", "not valid JSON"},
      {"blank line", "merges.txt", "a b\n\nab c\n", "merge 2 must be two tokens"},
      {"unknown token", "merges.txt", "a b\nab z\n", "merge 2 (\"ab\" and \"z\")"},
      {"not UTF-8", "merges.txt", "a b\n\xFF b\n", "is not UTF-8 at byte 4"},
      {"trailing space", "merges.txt", "a b \n", "merge 1 must be two tokens"},
      {"another class", "tokenizer_config.json", R"({"tokenizer_class": "RobertaTokenizer"})",
       "asks for \"RobertaTokenizer\""},
      {"configuration not JSON", "tokenizer_config.json", "{", "not valid JSON"},
      {"configuration a list", "tokenizer_config.json", "[]", "a JSON object is needed"},
      {"flag a string", "tokenizer_config.json", R"({"add_bos_token": "true"})", "add_bos_token"},
      {"name a number", "tokenizer_config.json", R"({"bos_token": 2})", "must be a token's text"},
      {"name without content", "tokenizer_config.json", R"({"bos_token": {}})", "\"content\""},
      {"specials split", "tokenizer_config.json", R"({"split_special_tokens": true})",
       "split_special_tokens"},
      {"list with a name", "tokenizer_config.json",
       R"({"added_tokens_decoder": {"x": {"content": "<x>"}}})", "is no token id"},
      {"list with a far id", "tokenizer_config.json",
       R"({"added_tokens_decoder": {"77": {"content": "<x>"}}})", "next free one is 13"},
      {"list of strings", "tokenizer_config.json", R"({"added_tokens_decoder": {"13": "<x>"}})",
       "a JSON object is needed"},
      {"map a list", "special_tokens_map.json", "[]", "a JSON object is needed"},
      {"map name a list", "special_tokens_map.json", R"({"pad_token": ["a"]})", "a token's text"},
      {"added far", "added_tokens.json", R"({"<x>": 99})", "next free one is 13"},
      {"added two with one id", "added_tokens.json", R"({"<x>": 13, "<y>": 13})",
       "two tokens have the id 13"},
      {"added no id", "added_tokens.json", R"({"<x>": null})", "must be a token id"},
  };
  for (const auto& [name, file, content, because] : cases) {
    TokenizerDirectory directory;
    directory.write_json("vocab.json", small_tokenizer()["model"]["vocab"])
        .write("merges.txt", "a b\nab c\n");
    ASSERT_EQ(directory.failure(), std::nullopt);
    directory.write(file, content);
    expect_refused(directory, name, because);
  }
}

}  // namespace
}  // namespace poise
