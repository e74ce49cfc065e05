"""The rotary defaults of each Hugging Face model family, for what its configuration does not state."""

from dataclasses import dataclass, replace

DEFAULT_BASE = 10000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What `model_type` decides about the rotation. The defaults are Llama's.

    style, pairs_out, where, direction, sections and layout are fields of RopeConfig; base is the default of rope_theta,
    local_base that of sliding-window layers, partial that of partial_rotary_factor; indexer_style is the style of the
    sparse-attention indexer.
    """

    style: str = "half"
    pairs_out: str = "pairs"
    where: str = "leading"
    base: float = DEFAULT_BASE
    local_base: float | None = None
    partial: float | None = None
    sections: tuple[int, ...] | None = None
    layout: str = "chunked"
    # rope_type "yarn" means "deepseek_yarn" in this family: it also corrects the softmax scale.
    deepseek_yarn: bool = False
    indexer_style: str = "half"
    # -1 for a family that rotates by the negative angle.
    direction: int = 1
    # True where the defaults differ between layers, or are more than a base; config.json needs rope_parameters then.
    explicit: bool = False


LLAMA = Model()
_PAIRS = Model(style="pairs")
_MLA = Model(style="pairs", pairs_out="half", where="trailing", deepseek_yarn=True)
_QWEN2_VL = Model(base=1e6, sections=(16, 24, 24))
_QWEN3_VL = Model(base=500000.0, sections=(24, 20, 20), layout="interleaved")
_EDGE = Model(base=1e8, sections=(24, 20, 20), layout="interleaved")
_QWEN3_5 = Model(partial=0.25, sections=(11, 11, 10), layout="interleaved")
_GLM4V = Model(style="pairs", sections=(8, 12, 12))
_ERNIE_VL = Model(style="pairs", base=500000.0, sections=(22, 22, 20), layout="hwt")
_EXPLICIT = Model(explicit=True)
_GEMMA3 = Model(base=1e6, local_base=DEFAULT_BASE)


def _all(names: str, model: Model) -> dict[str, Model]:
    """Return the same defaults for every model_type in `names`, which are separated by spaces."""
    return dict.fromkeys(names.split(), model)


MODELS: dict[str, Model] = {
    **_all("afmoe arcee aria beam chameleon deepseek_ocr2 dia_decoder diffllama doge dots1 esm esmc eurobert", LLAMA),
    **_all("exaone4 exaone_moe falcon falcon_h1 flint gemma gemma2 gpt_neox_japanese gradium_phonon_tts", LLAMA),
    **_all("granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared hrm", LLAMA),
    **_all("hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hyperclovax idefics jais2 jetmoe kolibri1", LLAMA),
    **_all("kyutai_speech_to lasr_encoder llama mimi ministral mistral molmo2 moshi muse_glimmer neucodec", LLAMA),
    **_all("olmo olmo2 olmo_hybrid olmoe phi3 phi4_multimodal pocket_tts pocket_tts_audio_tokenizer qwen2", LLAMA),
    **_all("qwen2_5_omni_dit qwen2_moe qwen3 qwen3_moe seed_oss starcoder2 step3p5 t5_gemma_module", LLAMA),
    **_all("timesfm2_5 unlimited_ocr vaultgemma xcodec2 zamba2", LLAMA),
    **_all("gptj codegen cohere2 cohere2_moe", _PAIRS),
    **_all("moonshine_streaming", replace(_PAIRS, partial=0.8)),
    **_all("pe_audio_encoder pe_audio_video_encoder pe_video_encoder", replace(_PAIRS, base=20000.0)),
    **_all("openai_privacy_filter", replace(_PAIRS, base=150000.0)),
    **_all("nanochat", Model(direction=-1)),
    **_all("cosmos3_edge", _EDGE),
    **_all("cohere ernie4_5 ernie4_5_moe llama4", replace(_PAIRS, base=500000.0)),
    **_all("helium", replace(_PAIRS, base=100000.0)),
    **_all("glm glm4 chatglm", replace(_PAIRS, partial=0.5)),
    **_all("deepseek_v3 deepseek_v32 kimi_k2 glm4_moe_lite mistral4 youtu axk1 axk2", _MLA),
    **_all("glm_moe_dsa mistral_large4", replace(_MLA, indexer_style="pairs")),
    **_all("longcat_flash", replace(_MLA, base=1e7)),
    **_all("deepseek_v2", replace(_MLA, pairs_out="pairs")),
    **_all("minicpm3 hy_v4", Model(where="trailing", deepseek_yarn=True)),
    **_all("deepseek_v4", Model(style="pairs", where="trailing", explicit=True)),
    **_all("qwen2_vl qwen2_5_vl qwen2_5_omni", _QWEN2_VL),
    **_all("paddleocr_vl", replace(_QWEN2_VL, base=500000.0)),
    **_all("qwen3_vl qwen3_vl_moe", _QWEN3_VL),
    **_all("qwen3_omni_moe", replace(_QWEN3_VL, base=1e6)),
    **_all("qwen3_5 qwen3_5_moe", _QWEN3_5),
    **_all("qwen4_exp", replace(_QWEN3_5, partial=None)),
    **_all("glm4v glm_ocr", _GLM4V),
    **_all("glm4v_moe", Model(partial=0.5, sections=(8, 12, 12))),
    **_all("ernie4_5_vl_moe ernie4_5_moe_vl", _ERNIE_VL),
    **_all("gemma3 gemma3n", _GEMMA3),
    **_all("glm4_moe phi persimmon nemotron bamba recurrent_gemma", Model(partial=0.5)),
    **_all("stablelm qwen3_next gpt_neox", Model(partial=0.25)),
    **_all("bitnet flex_olmo olmo3 mllama_text_model csm evolla", Model(base=500000.0)),
    **_all("muse_glimmer_assistant", Model(base=500000.0)),
    **_all("mixtral phimoe lfm2 lfm2_moe minimax cwm emu3_text_model solar_open", Model(base=1e6)),
    **_all("gte", Model(base=160000.0)),
    **_all("jina_embeddings_v3", Model(base=20000.0)),
    **_all("nomic_bert", Model(base=1000.0)),
    **_all("diffusion_gemma embedding_gemma2 gemma4 gemma4_unified laguna mellum mimo_v2_flash", _EXPLICIT),
    **_all("ultrabert zaya higgs_audio_v2 ministral3 muse_spark voxtral_realtime", _EXPLICIT),
    **_all("modernbert modernbert-decoder", replace(_EXPLICIT, base=160000.0, local_base=DEFAULT_BASE)),
    **_all("t5gemma2", replace(_EXPLICIT, base=1e6, local_base=DEFAULT_BASE)),
    **_all("apertus", Model(base=1.2e7)),
    **_all("gpt_oss", Model(base=150000.0)),
    **_all("hy_v3", Model(base=11158840.0)),
    **_all("minimax_m2 minimax_m3_vl", Model(base=5e6)),
    **_all("smollm3", Model(base=2e6)),
}
