// castiron emit --kernel gemm --shape 16x64 --codec bf16 --tokens 9 --isa avx2 --threads 2
// 689 lines, sha256 3ca097e90ada7f56f5498b0d70e6c2c259be1e4dcf97d0059f6d47cc129a7ae1
                %114:10 = scf.for %103 = %c0 to %c8 step %c7 iter_args(%104 = %93, %105 = %94, %106 = %95, %107 = %96, %108 = %97, %109 = %98, %110 = %99, %111 = %100, %112 = %101, %113 = %102) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                  %115 = vector.load %1[%103, %78] : memref<64x16xf32>, vector<8xf32>
                  %116 = arith.addi %78, %c7 : index
                  %117 = vector.load %1[%103, %116] : memref<64x16xf32>, vector<8xf32>
                  %118 = arith.addi %17, %103 : index
                  %119 = memref.load %m0[%77, %118] : memref<9x64xf32>
                  %120 = vector.broadcast %119 : f32 to vector<8xf32>
                  %121 = math.fma %120, %115, %104 : vector<8xf32>
                  %122 = math.fma %120, %117, %105 : vector<8xf32>
                  %123 = arith.addi %77, %c1 : index
                  %124 = arith.addi %17, %103 : index
                  %125 = memref.load %m0[%123, %124] : memref<9x64xf32>
                  %126 = vector.broadcast %125 : f32 to vector<8xf32>
                  %127 = math.fma %126, %115, %106 : vector<8xf32>
                  %128 = math.fma %126, %117, %107 : vector<8xf32>
                  %129 = arith.addi %77, %c11 : index
                  %130 = arith.addi %17, %103 : index
                  %131 = memref.load %m0[%129, %130] : memref<9x64xf32>
                  %132 = vector.broadcast %131 : f32 to vector<8xf32>
                  %133 = math.fma %132, %115, %108 : vector<8xf32>
                  %134 = math.fma %132, %117, %109 : vector<8xf32>
                  %135 = arith.addi %77, %c29 : index
                  %136 = arith.addi %17, %103 : index
                  %137 = memref.load %m0[%135, %136] : memref<9x64xf32>
                  %138 = vector.broadcast %137 : f32 to vector<8xf32>
                  %139 = math.fma %138, %115, %110 : vector<8xf32>
                  %140 = math.fma %138, %117, %111 : vector<8xf32>
                  %141 = arith.addi %77, %c4 : index
                  %142 = arith.addi %17, %103 : index
                  %143 = memref.load %m0[%141, %142] : memref<9x64xf32>
                  %144 = vector.broadcast %143 : f32 to vector<8xf32>
                  %145 = math.fma %144, %115, %112 : vector<8xf32>
                  %146 = math.fma %144, %117, %113 : vector<8xf32>
                  %147 = arith.addi %103, %c1 : index
                  %148 = vector.load %1[%147, %78] : memref<64x16xf32>, vector<8xf32>
                  %149 = arith.addi %78, %c7 : index
                  %150 = vector.load %1[%147, %149] : memref<64x16xf32>, vector<8xf32>
                  %151 = arith.addi %17, %147 : index
                  %152 = memref.load %m0[%77, %151] : memref<9x64xf32>
                  %153 = vector.broadcast %152 : f32 to vector<8xf32>
// 211 lines more
                  %365 = math.fma %363, %348, %332 : vector<8xf32>
                  %366 = arith.addi %77, %c29 : index
                  %367 = arith.addi %17, %345 : index
                  %368 = memref.load %m0[%366, %367] : memref<9x64xf32>
                  %369 = vector.broadcast %368 : f32 to vector<8xf32>
                  %370 = math.fma %369, %346, %337 : vector<8xf32>
                  %371 = math.fma %369, %348, %338 : vector<8xf32>
                  %372 = arith.addi %77, %c4 : index
                  %373 = arith.addi %17, %345 : index
                  %374 = memref.load %m0[%372, %373] : memref<9x64xf32>
                  %375 = vector.broadcast %374 : f32 to vector<8xf32>
                  %376 = math.fma %375, %346, %343 : vector<8xf32>
                  %377 = math.fma %375, %348, %344 : vector<8xf32>
                  scf.yield %352, %353, %358, %359, %364, %365, %370, %371, %376, %377 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                }
