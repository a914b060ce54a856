// SPDX-License-Identifier: Apache-2.0
// Unicode's normalization forms: what the standard's own examples say, what utf8proc says of whole texts (the product hands it
// small groups), and the bounds.
#include "engine/text/normalizer.h"

#include <utf8proc.h>

#include <array>
#include <cstdlib>
#include <iterator>

#include "tests/text/tokenizers.h"

namespace rubato::text {
namespace {

constexpr std::size_t plenty = 64u << 20;
constexpr std::array<UnicodeForm, 4> forms = {UnicodeForm::Nfc, UnicodeForm::Nfd, UnicodeForm::Nfkc, UnicodeForm::Nfkd};

std::string utf8(const std::u32string& code_points) {
  std::string text;
  for (const char32_t c : code_points) append_utf8(text, c);
  return text;
}

std::string in_form(UnicodeForm form, std::string_view text) {
  Result<std::string> formed = Normalizer({UnicodeStep{form}}).apply(text, plenty);
  EXPECT_TRUE(formed) << (formed ? "" : formed.error().message);
  return formed ? *std::move(formed) : std::string();
}

/// The library's own way through a whole text at once.
std::string reference(UnicodeForm form, const std::string& text) {
  const std::array<int, 4> options = {UTF8PROC_COMPOSE, UTF8PROC_DECOMPOSE, UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
                                      UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT};
  utf8proc_uint8_t* bytes = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), std::ssize(text), &bytes,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | options.at(static_cast<std::size_t>(form))));
  EXPECT_GE(size, 0);
  std::string formed(reinterpret_cast<const char*>(bytes), size < 0 ? 0 : static_cast<std::size_t>(size));
  std::free(bytes);
  return formed;
}

TEST(UnicodeForms, examples_of_the_standard_hold) {
  struct Example {
    std::u32string text, nfc, nfd, nfkc, nfkd;
  };
  const std::vector<Example> examples = {
      {U"\u00E9", U"\u00E9", U"e\u0301", U"\u00E9", U"e\u0301"},
      {U"e\u0301", U"\u00E9", U"e\u0301", U"\u00E9", U"e\u0301"},
      {U"\u212B", U"\u00C5", U"A\u030A", U"\u00C5", U"A\u030A"},                                    // a singleton
      {U"\u2126", U"\u03A9", U"\u03A9", U"\u03A9", U"\u03A9"},                                      // another
      {U"\u1E0A\u0323", U"\u1E0C\u0307", U"D\u0323\u0307", U"\u1E0C\u0307", U"D\u0323\u0307"},      // marks change places
      {U"a\u0315\u0300\u05AE\u0300b", U"\u00E0\u05AE\u0300\u0315b", U"a\u05AE\u0300\u0300\u0315b",  // equal classes do not
       U"\u00E0\u05AE\u0300\u0315b", U"a\u05AE\u0300\u0300\u0315b"},
      {U"\u0958", U"\u0915\u093C", U"\u0915\u093C", U"\u0915\u093C", U"\u0915\u093C"},              // never composed again
      {U"\u1100\u1161\u11A8", U"\uAC01", U"\u1100\u1161\u11A8", U"\uAC01", U"\u1100\u1161\u11A8"},  // Hangul by rule
      {U"\uAC00\u11A8", U"\uAC01", U"\u1100\u1161\u11A8", U"\uAC01", U"\u1100\u1161\u11A8"},
      {U"\uAC1C\u11A7", U"\uAC1C\u11A7", U"\u1100\u1162\u11A7", U"\uAC1C\u11A7", U"\u1100\u1162\u11A7"},  // no final, so it stays
      {U"\u0BC6\u0BBE", U"\u0BCA", U"\u0BC6\u0BBE", U"\u0BCA", U"\u0BC6\u0BBE"},                          // two of class 0
      {U"\uFB01", U"\uFB01", U"\uFB01", U"fi", U"fi"},                                                    // compatibility only
      {U"\u1E9B\u0323", U"\u1E9B\u0323", U"\u017F\u0323\u0307", U"\u1E69", U"s\u0323\u0307"},
      {U"\u0301a", U"\u0301a", U"\u0301a", U"\u0301a", U"\u0301a"},  // nothing to stand on
  };
  for (const Example& example : examples) {
    const std::string text = utf8(example.text);
    EXPECT_EQ(in_form(UnicodeForm::Nfc, text), utf8(example.nfc)) << text;
    EXPECT_EQ(in_form(UnicodeForm::Nfd, text), utf8(example.nfd)) << text;
    EXPECT_EQ(in_form(UnicodeForm::Nfkc, text), utf8(example.nfkc)) << text;
    EXPECT_EQ(in_form(UnicodeForm::Nfkd, text), utf8(example.nfkd)) << text;
  }
}

TEST(UnicodeForms, cutting_into_groups_changes_nothing) {
  // Every character and its decomposition, with a mark in front of it and behind it.
  for (const UnicodeForm form : forms) {
    std::string text;
    for (char32_t c = 0x80; c < 0x30000; ++c) {
      if (c >= 0xD800 && c <= 0xDFFF) continue;
      append_utf8(text, c);
      append_utf8(text, 0x0323);
      if (c % 256 != 255) continue;
      const std::string decomposed = in_form(UnicodeForm::Nfd, text);
      ASSERT_EQ(in_form(form, text), reference(form, text)) << std::hex << static_cast<std::uint32_t>(c);
      ASSERT_EQ(in_form(form, decomposed), reference(form, decomposed)) << std::hex << static_cast<std::uint32_t>(c);
      text.clear();
    }
  }
}

TEST(UnicodeForms, random_marks_vowels_and_letters_agree_with_the_library) {
  const std::u32string pool =
      U"aeoAs \n\u0300\u0301\u0323\u0327\u0345\u034F\u05AE\u05B4\u093C\u0915\u09BE\u09C7\u0BBE\u0BC6\u0CC2\u0CC6\u0DCF\u0DD9"
      U"\u1100\u1112\u1161\u1175\u11A8\u11C2\uAC00\uAC01\u1025\u102E\u3046\u3099\u4E2D\u212B\u0F71\u0F72\u0F73\u0F80\uFB1D\uFF9E"
      U"\uFF76\u0344\U00011099\U000110BA\U0001D15E\U0001F600\u200D\uFE0F";
  constexpr std::uint64_t seed = 15;
  std::mt19937_64 random(seed);
  for (int round = 0; round < 20'000; ++round) {
    std::u32string code_points(random() % 12, U' ');
    for (char32_t& c : code_points) c = pool[random() % pool.size()];
    const std::string text = utf8(code_points);
    for (const UnicodeForm form : forms) {
      const std::string formed = in_form(form, text);
      ASSERT_EQ(formed, reference(form, text)) << "seed " << seed << " round " << round;
      ASSERT_EQ(in_form(form, formed), formed) << "seed " << seed << " round " << round;
    }
  }
}

TEST(UnicodeForms, ascii_is_untouched) {
  std::string text;
  for (char c = 0; c < 0x7F; ++c) text.push_back(c);
  for (const UnicodeForm form : forms) EXPECT_EQ(in_form(form, text), text);
  EXPECT_EQ(in_form(UnicodeForm::Nfc, ""), "");
}

TEST(UnicodeForms, stages_run_in_order) {
  const Normalizer normalizer({ReplaceStep{.pattern = "_", .content = "\u0301"}, UnicodeStep{UnicodeForm::Nfc},
                               ReplaceStep{.pattern = "\u00E9", .content = "E"}});
  EXPECT_EQ(*normalizer.apply("e_e", plenty), "Ee");
}

TEST(UnicodeForms, a_text_that_grows_too_large_is_refused) {
  std::string text;
  for (int index = 0; index < 1000; ++index) text += "\uFDFA";  // 3 bytes that NFKC makes 33 of
  const Result<std::string> refused = Normalizer({UnicodeStep{UnicodeForm::Nfkc}}).apply(text, 10'000);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::InvalidArgument);
  EXPECT_NE(refused.error().message.find("3000 bytes is too long"), std::string::npos) << refused.error().message;
  EXPECT_EQ(in_form(UnicodeForm::Nfkc, text).size(), 33'000U);
}

TEST(UnicodeForms, piles_of_marks_are_sorted_quickly_and_endless_ones_refused) {
  std::string pile = "a";
  for (int index = 0; index < 30'000; ++index) pile += "\u0301\u0323";  // above and below in turn: the worst order there is
  std::string text;
  for (int index = 0; index < 20; ++index) text += pile;  // 20 * 30,000^2 / 2 exchanges, were they sorted by exchanges
  const std::string formed = in_form(UnicodeForm::Nfd, text);
  EXPECT_EQ(formed.size(), text.size());
  EXPECT_EQ(formed.substr(0, 5), "a\u0323\u0323");

  for (int index = 0; index < 40'000; ++index) pile += "\u0301";
  const Result<std::string> refused = Normalizer({UnicodeStep{UnicodeForm::Nfc}}).apply(pile, plenty);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::InvalidArgument);
  EXPECT_NE(refused.error().message.find("combining marks"), std::string::npos) << refused.error().message;
}

}  // namespace
}  // namespace rubato::text
