"""Find the answer in Chinese and Japanese prose, whose words no spaces part: 答案是72, 共有72个苹果, 答えは72です.

Only what is clear counts: a sentence with two numbers, a hedge, a comparison or words that change the number
("72的一半") states nothing. Texts are in NFKC, in which ： and ， are ASCII.
"""

from __future__ import annotations

import re

LONGEST = 1000  # characters of a sentence
POWERS = {"万": 4, "萬": 4, "亿": 8, "億": 8}
MYRIAD = re.compile(r"(?<=\d)\s*([万萬亿億])")
CJK = "\u3005\u3040-\u30ff\u3400-\u9fff"  # Chinese and Japanese letters, for a class of characters
CJK_UNIT = (  # without letters that may change the number: 72以上, 72倍, 72半
    rf"(?:(?![以不非未超半的之の倍成割折百十多余几下上な第乗根約因違加減减乘除打一二三四五六七八九两太了是有在会能]"
    rf"|千(?![克米瓦卡])|(?:平方|立方)\Z)[{CJK}]){{1,4}}"
)
NOT = re.compile(
    "不是|并非|並非|不等于|不等於|不为|不為|不对|不對|不正确|不正確|错误|錯誤|ではな|ではあり|じゃな|違い|違う|間違"
)
LATER = re.compile(rf"{NOT.pattern}|错了|有误|更正|修正|纠正|訂正|重新|应该是|应为|等等|等一下|いや|待って|正しくは")
BEFORE = re.compile(rf"{NOT.pattern}|以为|以為|有人|他们说")
COPULA = r"(?:应该|应|應|就|便|约|約|\s|\*)*(?:是|为|為|等于|等於|は|:|=)"
STATED = re.compile(
    rf"(?:答案|答え|正解|解答|最终结果|最終結果){COPULA}[\s:*]*"
    rf"|(?<![{CJK}])答\s*[:は]\s*"
    r"|(?<![^\s,。]|[不别])(?:故|应|應|因此|所以)? ?[选選]择? ?:? ?(?=[A-J](?![A-Za-z]))"
)
CONCLUSION = re.compile(
    r"所以|因此|因而|从而|於是|于是|故(?![事障乡])|综上|总共|一共|(?<!公)共有?(?!同)|总计|合[计計]|全部で|等[于於]|得到"
    r"|(?<![获取觉值懂])得|即|(?<![不还于但可只总])是(?![否不])|(?<![因以认作不])[为為]|は|よって|したがって|ゆえに|だから|つまり"
)
ENUMERATED = re.compile(r"^\s*\(?\d+[.)、]\s*")
SENTENCE_END = re.compile(r"[。!?\n]|\.(?=\s|\Z)")
REASON = re.compile(r"[,;]?\s*(?=因为|因為|由于|由於|即|也就是|而不是|而非|不是|なぜなら|つまり)|[,;]\s*(?=比|其中)")
SUPPOSED = re.compile(
    "如果|假如|假设|若|もし|仮に|吗|ですか|可能|也许|或许|大概|估计|かも|たぶん|おそらく"
    "|(?:因为|因為|由于|由於|なぜなら)(?!.*(?:所以|因此|故))"
)
UNCLEAR = re.compile(  # what hedges, bounds or changes a number, or numbers something else
    r"不(?!同)|没|沒|非(?!常)|[无無未错錯误誤違否]|ない|ませ"
    r"|以[上下内外]|超[过過え]|[少多大小高低][于於]|より|比(?![例率值])"
    r"|[加减減乘除](?=[上去以于一二三四五六七八九十两])|足す|引く|掛け|割る"
    r"|(?:平方|立方)(?![米厘公分千毫メセキ])|次方|乗|[幂冪]|阶乘|倒数|逆数|相反数|[绝絶][对対][值値]|方根|根号|ルート"
    r"|半(?![径徑])|[两二三四五六七八九十双]倍|ダース|[因约約倍]数"
    r"|\d\s*(?:[十折割又打]|百(?![米帕])|千(?![克米瓦卡])|[多余来几成]|点[一二三四五六七八九零])"
    r"|(?:[十百千第点又]|零下)(?:\s|\\\(|\$)*\d"
    r"|(?:步骤|步驟|问题|問題|ステップ|例|方法|情况|[图図式注])\s*\(?\d"
)
SPELLINGS = (
    (MYRIAD, lambda scale: f" \\cdot 10^{{{POWERS[scale[1]]}}}"),
    (re.compile(r"(?:[负負]|マイナス)\s*(?=\d)"), "-"),
    (re.compile(r"百分之\s*(\d+(?:\.\d+)?)"), r"\1%"),
    (re.compile(r"(?<=\d)\s*パーセント"), "%"),
    (re.compile(r"(?<![\d.])(\d+)\s*分[之の]\s*(\d+)"), r"\2/\1"),
    (re.compile(rf"(?<=[^{CJK}、])\s*(?:和|与|與|及|以及|或者?|と|または|、)\s*(?=[^{CJK}、])"), ", "),
)


def stated_answer(text: str) -> str | None:
    """The answer that the last "the answer is" introduces; None if there is none, or not clearly one. Several joined by
    "and" or "or" are a list."""
    *_, stated = [None, *STATED.finditer(text)]
    if stated is None:
        return None
    sentence, asked, later = _sentence(text[stated.end() :])
    before = SENTENCE_END.split(text[: stated.start()])[-1].rpartition(",")[2]
    return None if asked or BEFORE.search(before) or LATER.search(later) else _only_answer(sentence)


def concluded_answer(text: str) -> str | None:
    """The number after the last "so", "in total" or the like of the last sentence; None if it is not clearly one."""
    line = ENUMERATED.sub("", text.strip().rpartition("\n")[2])[-LONGEST:]
    *_, last = ["", *(part for part in re.split(r"(?<=[。!?])", line) if part.strip())]
    *_, conclusion = [None, *CONCLUSION.finditer(last)]
    if conclusion is None or STATED.search(last) or NOT.search(last) or SUPPOSED.search(last):
        return None
    sentence, asked, _ = _sentence(last[conclusion.end() :])
    answer = None if asked or re.search(r"\d\s*[的の]", sentence) else _only_answer(sentence)
    return answer if answer and re.search(r"\d", answer) else None


def has_unclear_number(line: str) -> bool:
    """True if a number stands beside Chinese or Japanese letters, or numbers a line of them."""
    return bool(re.search(rf"\d[{CJK}]|[{CJK}][-+]?\d", line) or re.search(rf"{ENUMERATED.pattern}.*[{CJK}]", line))


def _sentence(text: str) -> tuple[str, bool, str]:
    """The first sentence, whether it is a question, and the text after it. A long one is cut."""
    end = SENTENCE_END.search(text)
    return (text[: end.start()][:LONGEST], end[0] == "?", text[end.end() :]) if end else (text[:LONGEST], False, "")


def _only_answer(sentence: str) -> str | None:
    """What is not Chinese or Japanese in a sentence, if it is in one piece and nothing around changes its meaning."""
    said, *others = re.split(rf",(?=\s*[{CJK}])", REASON.split(sentence, maxsplit=1)[0])
    if any(LATER.search(other) or re.search(r"\w", re.sub(f"[{CJK}]", "", other)) for other in others):
        return None
    for pattern, spelling in SPELLINGS:
        said = pattern.sub(spelling, said)
    if NOT.search(said) or UNCLEAR.search(said) or SUPPOSED.search(said):
        return None
    pieces = [piece for piece in re.split(f"[{CJK}、「」『』【】]+", said) if re.search(r"\w", piece)]
    return pieces[0].strip(" ,:;*") if len(pieces) == 1 else None
