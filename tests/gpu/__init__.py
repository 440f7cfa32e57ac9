"""A short day with a real GPU: stages that are tried one after the other, and what each of them saw.

    make gpu-pack                     the wheels that a machine without a network needs, into gpu_pack/
    python3 -m tests.gpu              all stages that are left, as far as nine and a half minutes allow
    python3 -m tests.gpu parity       this stage alone; --again repeats one that was ok

Each stage is a process of its own. It writes gpu_report/<stage>.log, and a line of gpu_report/stages.jsonl. A stage
that fails or hangs ends no other one. The same command typed again goes on with what is left.
"""
