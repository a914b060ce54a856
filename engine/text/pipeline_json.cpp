// SPDX-License-Identifier: Apache-2.0
// Sequences are flattened first, so that the rules about order are stated once per stage.
#include "engine/text/pipeline_json.h"

#include <algorithm>

#include "engine/text/utf8.h"

namespace rubato::text {
namespace {

constexpr std::size_t steps_max = 16;
constexpr std::size_t text_changing_steps_max = 2;  // bounds how much pre-tokenizing can enlarge a text
constexpr std::size_t pattern_bytes_max = 16 * 1024;
constexpr std::size_t replacement_bytes_max = 64;

constexpr std::string_view gpt2_pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// The stages of field in order, `Sequence`s opened up. list_key: what a Sequence calls its list.
void flatten(const JsonField& field, std::string_view list_key, std::size_t depth, std::vector<JsonField>& stages) {
  if (field.at("type").string() != "Sequence") {
    if (stages.size() == steps_max) field.fail("more than " + std::to_string(steps_max) + " stages");
    stages.push_back(field);
    return;
  }
  if (depth == 4) field.fail("sequences within sequences, more than 4 deep");
  for (const JsonField& item : field.at(list_key).items(steps_max)) flatten(item, list_key, depth + 1, stages);
}

std::vector<JsonField> stages_of(const std::optional<JsonField>& field, std::string_view list_key) {
  std::vector<JsonField> stages;
  if (field) flatten(*field, list_key, 0, stages);
  return stages;
}

[[noreturn]] void refuse(const JsonField& stage, std::string_view supported) {
  stage.at("type").fail("`" + stage.at("type").string() + "` is not supported; supported are " + std::string(supported));
}

const std::string& bounded(const JsonField& field, std::size_t bytes_max) {
  if (field.string().size() > bytes_max) field.fail("longer than " + std::to_string(bytes_max) + " bytes");
  return field.string();
}

/// {"String": s} and nothing else.
const std::string& literal_pattern(const JsonField& field) {
  if (!field.find("String")) field.fail("only literal patterns ({\"String\": ...}) are supported here");
  const std::string& pattern = bounded(field.at("String"), replacement_bytes_max);
  if (pattern.empty()) field.fail("the pattern is empty");
  return pattern;
}

SplitPattern compile(const JsonField& at, std::string_view pattern, PatternKind kind) {
  Result<SplitPattern> compiled = SplitPattern::compile(pattern, kind);
  if (!compiled) at.fail(compiled.error().message);
  return *std::move(compiled);
}

SplitBehavior read_behavior(const JsonField& field) {
  const std::string& name = field.string();
  if (name == "Isolated") return SplitBehavior::Isolated;
  if (name == "Removed") return SplitBehavior::Removed;
  if (name == "Contiguous") return SplitBehavior::Contiguous;
  if (name == "MergedWithPrevious") return SplitBehavior::MergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::MergedWithNext;
  field.fail("`" + name + "` is none of Isolated, Removed, Contiguous, MergedWithPrevious, MergedWithNext");
}

SplitStep read_split(const JsonField& stage) {
  const JsonField pattern = stage.at("pattern");
  const std::optional<JsonField> regex = pattern.find("Regex");
  return SplitStep{.pattern = regex ? compile(*regex, bounded(*regex, pattern_bytes_max), PatternKind::Regex)
                                    : compile(pattern, literal_pattern(pattern), PatternKind::Literal),
                   .behavior = read_behavior(stage.at("behavior")),
                   .sense = stage.boolean_or("invert", false) ? SplitSense::Gaps : SplitSense::Matches};
}

/// Metaspace's replacement: one character.
const std::string& read_replacement(const JsonField& stage) {
  const JsonField field = stage.at("replacement");
  const std::string& text = field.string();
  if (text.empty() || character_at(text, 0).size_bytes != text.size()) field.fail("must be one character");
  return text;
}

std::optional<UnicodeForm> unicode_form(std::string_view name) {
  if (name == "NFC") return UnicodeForm::Nfc;
  if (name == "NFD") return UnicodeForm::Nfd;
  if (name == "NFKC") return UnicodeForm::Nfkc;
  if (name == "NFKD") return UnicodeForm::Nfkd;
  return std::nullopt;
}

MetaspaceStep::Prepend read_prepend(const JsonField& stage) {
  const std::optional<JsonField> scheme = stage.find("prepend_scheme");
  if (!scheme) {
    return stage.boolean_or("add_prefix_space", true) ? MetaspaceStep::Prepend::Always : MetaspaceStep::Prepend::Never;
  }
  if (scheme->string() == "always") return MetaspaceStep::Prepend::Always;
  if (scheme->string() == "first") return MetaspaceStep::Prepend::First;
  if (scheme->string() == "never") return MetaspaceStep::Prepend::Never;
  scheme->fail("`" + scheme->string() + "` is none of always, first, never");
}

}  // namespace

Normalizer read_normalizer(const std::optional<JsonField>& field) {
  std::vector<Normalizer::Step> steps;
  for (const JsonField& stage : stages_of(field, "normalizers")) {
    const std::string& type = stage.at("type").string();
    if (type == "Prepend") {
      steps.emplace_back(PrependStep{bounded(stage.at("prepend"), replacement_bytes_max)});
    } else if (type == "Replace") {
      steps.emplace_back(ReplaceStep{literal_pattern(stage.at("pattern")), bounded(stage.at("content"), replacement_bytes_max)});
    } else if (const std::optional<UnicodeForm> form = unicode_form(type)) {
      steps.emplace_back(UnicodeStep{*form});
    } else {
      refuse(stage, "Sequence, Prepend, Replace, NFC, NFD, NFKC, NFKD");
    }
  }
  return Normalizer(std::move(steps));
}

PreTokenizerRules read_pre_tokenizer(const std::optional<JsonField>& field) {
  std::vector<PreTokenizer::Step> steps;
  Alphabet alphabet = Alphabet::Characters;
  std::size_t text_changing_steps = 0;
  for (const JsonField& stage : stages_of(field, "pretokenizers")) {
    if (alphabet == Alphabet::Bytes) stage.fail("stands after ByteLevel, which must be the last stage");
    const std::string& type = stage.at("type").string();
    if (type == "Split") {
      steps.emplace_back(read_split(stage));
    } else if (type == "Digits") {
      const bool each = stage.boolean_or("individual_digits", false);
      steps.emplace_back(SplitStep{.pattern = compile(stage, R"(\p{N})", PatternKind::Regex),
                                   .behavior = each ? SplitBehavior::Isolated : SplitBehavior::Contiguous});
    } else if (type == "Metaspace") {
      ++text_changing_steps;
      const std::string& replacement = read_replacement(stage);
      steps.emplace_back(MetaspaceStep{.replacement = replacement, .prepend = read_prepend(stage)});
      if (stage.boolean_or("split", true)) {
        steps.emplace_back(
            SplitStep{.pattern = compile(stage, replacement, PatternKind::Literal), .behavior = SplitBehavior::MergedWithNext});
      }
    } else if (type == "ByteLevel") {
      alphabet = Alphabet::Bytes;
      if (stage.boolean_or("add_prefix_space", true)) {
        ++text_changing_steps;
        steps.emplace_back(PrefixSpaceStep{});
      }
      if (stage.boolean_or("use_regex", true)) {
        steps.emplace_back(SplitStep{.pattern = compile(stage, gpt2_pattern, PatternKind::Regex)});
      }
    } else {
      refuse(stage, "Sequence, Split, Digits, Metaspace, ByteLevel");
    }
    if (text_changing_steps > text_changing_steps_max) stage.fail("more than two stages that add blanks");
  }
  return {PreTokenizer(std::move(steps)), alphabet};
}

namespace {

/// Wraps what the stages before have put round the text.
void read_template(const JsonField& stage, std::int32_t vocabulary, Surround& surround) {
  Surround outer;
  bool text_seen = false;
  const JsonField single = stage.at("single");
  for (const JsonField& item : single.items(64)) {
    if (item.find("Sequence")) {
      if (text_seen) item.fail("the text stands twice in the template");
      text_seen = true;
      continue;
    }
    const JsonField name = item.at("SpecialToken").at("id");
    for (const JsonField& id : stage.at("special_tokens").at(name.string()).at("ids").items(64)) {
      (text_seen ? outer.suffix : outer.prefix).push_back(static_cast<TokenId>(id.integer(0, vocabulary - 1)));
    }
  }
  if (!text_seen) single.fail("the text itself is missing from the template");
  surround.prefix.insert(surround.prefix.begin(), outer.prefix.begin(), outer.prefix.end());
  surround.suffix.insert(surround.suffix.end(), outer.suffix.begin(), outer.suffix.end());
}

}  // namespace

Surround read_post_processor(const std::optional<JsonField>& field, std::int32_t vocabulary) {
  Surround surround;
  for (const JsonField& stage : stages_of(field, "processors")) {
    const std::string& type = stage.at("type").string();
    if (type == "TemplateProcessing") {
      read_template(stage, vocabulary, surround);
    } else if (type != "ByteLevel") {  // ByteLevel trims offsets, which nothing here reports
      refuse(stage, "Sequence, TemplateProcessing, ByteLevel");
    }
  }
  return surround;
}

DecoderRules read_decoder(const JsonField& field) {
  DecoderRules rules;
  const std::vector<JsonField> stages = stages_of(field, "decoders");
  if (stages.empty()) field.fail("no stage in it");
  bool fused = false;
  for (const JsonField& stage : stages) {
    const std::string& type = stage.at("type").string();
    if (type == "ByteLevel" || type == "Metaspace") {
      if (stages.size() > 1) stage.fail(type + " stands alone or not at all");
      rules.byte_level = type == "ByteLevel";
      if (rules.byte_level) break;
      rules.blank = read_replacement(stage);
      rules.replacements.emplace_back(rules.blank, " ");
      const bool drops = read_prepend(stage) != MetaspaceStep::Prepend::Never;
      rules.leading_blank = drops ? LeadingBlank::DropOfFirstToken : LeadingBlank::Keep;
    } else if (type == "Replace") {
      if (fused || rules.byte_fallback) stage.fail("Replace stands after ByteFallback or Fuse");
      rules.replacements.emplace_back(literal_pattern(stage.at("pattern")), bounded(stage.at("content"), replacement_bytes_max));
    } else if (type == "ByteFallback") {
      if (fused) stage.fail("ByteFallback stands after Fuse");
      rules.byte_fallback = true;
    } else if (type == "Fuse") {
      fused = true;
    } else if (type == "Strip") {
      if (!fused) stage.fail("Strip is supported after Fuse only");
      if (stage.at("content").string() != " ") stage.at("content").fail("only a blank can be stripped");
      const std::int64_t count = stage.at("start").integer(0, 1);
      (void)stage.at("stop").integer(0, 0);
      if (count == 1) rules.leading_blank = LeadingBlank::StripOne;
    } else {
      refuse(stage, "Sequence, ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip");
    }
  }
  return rules;
}

}  // namespace rubato::text
