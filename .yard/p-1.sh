export R=$PWD PYTHONPATH=$PWD/src:$PWD/tests:$PWD/tests/common:$PWD/tools; exec > >(tee $OUT/log-p-1) 2>&1
export GLOO_SOCKET_IFNAME=lo
PY=$(command -v python3)
echo "== memlock $(ulimit -l), shm $(df -h /dev/shm | tail -1)"; nvidia-smi --query-gpu=name,pcie.link.gen.current,pcie.link.width.current --format=csv,noheader; nvidia-smi topo -m 2>/dev/null | head -4; lscpu | grep -E "Model name|NUMA node\(s\)"; free -g | head -2
cat > $OUT/floors.py <<'P'
import time, torch
torch.cuda.init(); d="cuda"
N=512<<20
t=time.perf_counter(); host=torch.empty(2*N,dtype=torch.uint8); host.fill_(1); t1=time.perf_counter()
r=torch.cuda.cudart().cudaHostRegister(host.data_ptr(),host.nbytes,3); t2=time.perf_counter()
print(f"register 1 GiB: result {int(r)}, touch {t1-t:.3f} s, register {t2-t1:.3f} s")
dev=torch.empty(2*N,dtype=torch.uint8,device=d)
s=[torch.cuda.Stream() for _ in range(4)]
lib=torch.cuda.cudart()
from cuda.bindings import driver as drv
def copy(dst,src,n,st): drv.cuMemcpyAsync(drv.CUdeviceptr(dst),drv.CUdeviceptr(src),n,drv.CUstream(st.cuda_stream))
def batch(jobs, reps=5):
    best=[]
    for _ in range(reps):
        torch.cuda.synchronize(); a=torch.cuda.Event(enable_timing=True); ends=[]
        with torch.cuda.stream(s[3]): a.record(s[3])
        for st in {id(j[3]):j[3] for j in jobs}.values(): st.wait_event(a)
        for j in jobs: copy(*j)
        for st in {id(j[3]):j[3] for j in jobs}.values():
            e=torch.cuda.Event(enable_timing=True); e.record(st); ends.append(e)
        torch.cuda.synchronize(); best.append(max(a.elapsed_time(e) for e in ends)*1e3)
    return sorted(best)[len(best)//2]
H,D=host.data_ptr(),dev.data_ptr()
for piece in (4<<10,64<<10,256<<10,1<<20,2<<20,4<<20,8<<20,16<<20,32<<20,256<<20):
    total=min(256<<20,piece*64); k=total//piece
    out=[(H+i*piece,D+i*piece,piece,s[0]) for i in range(k)]
    inn=[(D+N+i*piece,H+N+i*piece,piece,s[1]) for i in range(k)]
    a,b=batch(out),batch(inn)
    both=[x for p in zip(out,inn) for x in p]; c=batch(both)
    same=batch([(x[0],x[1],x[2],s[0]) for x in both])
    print(f"piece {piece>>10:7d} KiB x{k}: out {total/a/1e3:5.1f} GB/s ({a/k:8.2f} us each), in {total/b/1e3:5.1f} ({b/k:8.2f}), both {total/c/1e3:5.1f} each way ({c:.0f} us), both on one stream {total/same/1e3:5.1f}")
one=batch([(H,D,512,s[0])]); print("512 B copy out, event to event", one)
# stream ops on host words
w=host[:4096]; ops=lambda st,addr,val,wait: (drv.cuStreamWaitValue32 if wait else drv.cuStreamWriteValue32)(drv.CUstream(st.cuda_stream),drv.CUdeviceptr(addr),drv.cuuint32_t(val),0)
def flagged(n=64):
    v=flagged.v; torch.cuda.synchronize(); a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
    a.record(s[0])
    for i in range(n):
        ops(s[0],H+64,v+i+1,False); ops(s[1],H+64,v+i+1,True); ops(s[1],H+128,v+i+1,False); ops(s[0],H+128,v+i+1,True)
    b.record(s[0]); torch.cuda.synchronize(); flagged.v+=n; return a.elapsed_time(b)*1e3/n
flagged.v=10
host[:4096]=0
print("flag there and back between two streams, words in host memory: us", [round(flagged(),2) for _ in range(5)])
def pipelined(total,piece,slots,n=5):
    """One GPU to itself: out in pieces, flag, in; both directions carry total."""
    ts=[]
    for _ in range(n):
        v=pipelined.v; k=-(-total//piece); torch.cuda.synchronize(); a,b,c=[torch.cuda.Event(enable_timing=True) for _ in range(3)]
        a.record(s[0]); s[1].wait_event(a)
        for i in range(k):
            if i>=slots: ops(s[0],H+192,v+i-slots+1,True)
            copy(H+4096+i%slots*piece,D+i*piece,min(piece,total-i*piece),s[0]); ops(s[0],H+256,v+i+1,False)
            ops(s[1],H+256,v+i+1,True); copy(D+N+i*piece,H+4096+i%slots*piece,min(piece,total-i*piece),s[1]); ops(s[1],H+192,v+i+1,False)
        b.record(s[0]); c.record(s[1]); torch.cuda.synchronize(); pipelined.v+=k; ts.append(max(a.elapsed_time(b),a.elapsed_time(c))*1e3)
    return sorted(ts)[len(ts)//2]
pipelined.v=1000
for total in (1<<20,4<<20,16<<20,64<<20,256<<20):
    for slots in (2,4):
        print(f"through host, {total>>20} MiB, {slots} slots:", ", ".join(f"{p>>10}K {total/pipelined(total,p,slots)/1e3:.1f}" for p in (128<<10,256<<10,512<<10,1<<20,2<<20,4<<20,8<<20,16<<20,32<<20) if p<=total), "GB/s")
P
timeout 60 $PY $OUT/floors.py
echo "== test_host_peers"
timeout 100 $PY -m pytest -q -p no:xdist -p no:cacheprovider -m device tests/session/test_host_peers.py --tb=long 2>&1 | tail -80
echo "== test_large_messages"
timeout 60 $PY -m pytest -q -p no:xdist -p no:cacheprovider -m device tests/collectives/test_collectives.py -k large_messages --tb=long 2>&1 | tail -80
echo "== collectives through host memory, two ranks on one GPU (latencies mean nothing, correct does)"
export SIDELANE_PEERS=host
timeout 110 $PY -m sidelane collective --collective all --ranks 2 --device gpu --min-bytes 512 --max-bytes 64M --factor 8 --implementations dma,sm,auto --iterations 5 --warmup 1 --no-profile --timeout 100 --json $OUT/p-host-shared.json 2>&1 | cut -c1-170 | tail -150
echo "== ends"; ls /dev/shm; ps aux | grep -c "[s]idelane"
