"""Progress, checkpoints, stops and resumes for training loops of other libraries: one function `attach` per library.

    from cloudtrain_runtime.integrations.huggingface import attach

    trainer = SFTTrainer(...)
    attach(trainer)
    trainer.train()

`huggingface` is for the Trainer of Transformers and of libraries that derive from it, such as TRL. `lightning` is for
the Trainer of Lightning. `accelerate` is for loops with Accelerate, which iterate by what its `attach` returns. Each
needs its library, and is imported by itself.
"""
