# Source it on a machine that is lent for minutes: `r SECONDS NAME COMMAND...` runs a command with a hard end. Its output
# goes to $D/NAME.txt, and the last T lines (25) are shown. D is $OUT/r; `ends` packs it into one file, $OUT/all.tgz.
# Wait for jobs by number (`wait $p1 $p2`): a bare `wait` also waits for what `exec > >(tee ...)` has started.
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1 D=$OUT/r
mkdir -p $D
r() { local s=$1 n=$2; shift 2; local b=$(date +%s)
  timeout -k 4 -s INT $s "$@" > $D/$n.txt 2>&1 < /dev/null; echo "== $n rc=$? $(( $(date +%s) - b )) s"
  tail -n ${T:-25} $D/$n.txt | cut -c1-220
  pkill -9 -f "results/scripts/.*py|tools/device_tests|-m sidelane|multiprocessing|examples/" > /dev/null 2>&1; }
ends() { (cd $OUT && tar czf all.tgz r && rm -rf r); }
