"""The language of the command line: English, or Chinese for the list of commands and the demo."""

import os

ENGLISH, CHINESE = "en", "zh"
_LOCALE_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The first that is set decides, as in POSIX."""

_CHINESE = {
    "Commands": "命令",
    "Speculative decoding for open-weight language models.": "用于开放权重语言模型的投机解码。",
    "Try it with the embedded model, which needs no download:": "先用内置模型试试，不需要下载：",
    "checks that the method changes nothing": "检验该方法不改变输出",
    # Commands of the help.
    "Answer three prompts by plain and by speculative decoding, and compare.": "普通解码与投机解码各答三题并比较。",
    "Answer a prompt, or a file of prompts, with any decoding method.": "用任一解码方法回答一个或一个文件的提示。",
    "Chat with a model in the terminal.": "在终端里与模型对话。",
    "Serve a model over HTTP with OpenAI's API.": "通过 HTTP 提供模型服务，兼容 OpenAI 的 API。",
    "Print what will be read of a model, without its weights.": "显示将从一个模型读取什么，不读取权重。",
    "List the models on this machine and the speculators that fit them.": "列出本机的模型和与之匹配的投机网络。",
    "List the decoding methods, or explain one of them.": "列出解码方法，或解释其中一种。",
    "Check on your model and machine that a method changes nothing.": "在你的模型和机器上检验一种方法不改变输出。",
    "Measure methods against plain decoding and other runtimes.": "测量各方法，与普通解码和其他运行时比较。",
    "Watch a running server in the terminal.": "在终端里观察运行中的服务器。",
    "Generate training data: the model answers its own prompts, or given ones.": "由模型的回答生成训练数据。",
    "Write a trained speculator in the format of another engine.": "把训练好的投机网络写成其他引擎的格式。",
    "Index a corpus for retrieval (REST).": "为检索（REST）建立语料索引。",
    "Choose thresholds, placements and temperatures from data.": "由数据选定阈值、放置和温度。",
    "List or clear the packed weights that are kept for the next start.": "列出或清除为下次启动保留的打包权重。",
    "Explain what commands share: dtype, methods, sampling.": "解释各命令共有的内容：dtype、methods、sampling。",
    "Print processor, kernels, versions and paths: what a bug report needs.": "显示报告错误所需的环境信息。",
    "Train a speculator on a model's own answers.": "用模型自己的回答训练投机网络。",
    "Predict cost and speed-up without running a model.": "不运行模型，预测代价和加速比。",
    # The demo.
    "code": "代码",
    "summary": "摘要",
    "chat": "对话",
    "prompt": "提示",
    "method": "方法",
    "tokens/s": "词元/秒",
    "tokens/pass": "词元/趟",
    "speed-up": "加速比",
    "text": "文本",
    "identical": "相同",
    "DIFFERENT": "不同",
    "the same text in fewer passes of the model": "文本相同，模型的趟数更少",
}
"""Chinese by the English text."""

_chosen: str | None = None


def choose(language: str | None) -> None:
    """Choose the language of this process; None: that of the locale.

    Raises:
        ValueError: there is none of this name.
    """
    global _chosen
    if language not in (None, ENGLISH, CHINESE):
        raise ValueError(f"--lang must be {ENGLISH} or {CHINESE}, found {language!r}")
    _chosen = language


def language() -> str:
    """The language that was chosen, else that of the locale."""
    if _chosen is not None:
        return _chosen
    locale = next((value for name in _LOCALE_VARIABLES if (value := os.environ.get(name))), "")
    return CHINESE if locale.lower().startswith(CHINESE) else ENGLISH


def translated(text: str) -> str:
    """A text in the language of this process; where it has no translation, as it is."""
    return _CHINESE.get(text, text) if language() == CHINESE else text
