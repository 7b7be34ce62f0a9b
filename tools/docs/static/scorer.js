// Order of search results: pages that answer a user's question stand before measurements and records of decisions.
const WEIGHTS = [
  ["decisions/", 0.1],
  ["changes", 0.2],
  ["lab/", 0.3],
  ["reference/results", 0.3],
  ["reference/compatibility", 0.3],
  ["internals/", 0.6],
];

var Scorer = {
  score: ([page, title, anchor, description, score, file]) => {
    const found = WEIGHTS.find(([start]) => page.startsWith(start));
    return score * (found ? found[1] : 1);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
